// CTAs of a cluster, which run at the same time and read each other's shared memory: the slices of a sum.
#pragma once
#include "device.cuh"

#ifdef MOET_EMULATE
// A kernel whose clusters are the slices of an item (StreamArgs).
#define CLUSTERED(name, Args, threads)                                                                 \
  extern "C" int emulate_##name(const Args* args, int grid_x, int, int shared_bytes) {                 \
    return emulation::run_clusters(grid_x, args->slices, threads, shared_bytes, [=] { name(*args); }); \
  }
DEVICE void sync_slices() { emulation::meet_cluster(); }
DEVICE float load_of_rank(const float* mine, int rank) { return *emulation::of_rank(mine, rank); }
#else
#define CLUSTERED(name, Args, threads)
// All threads of all CTAs; what they wrote to shared memory before is seen after.
DEVICE void sync_slices() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
// What lies in the shared memory of the cluster's CTA `rank` where `mine` lies in this one's.
DEVICE float load_of_rank(const float* mine, int rank) {
  uint32_t at;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
#endif
