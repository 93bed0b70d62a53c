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
DEVICE void arrive_at_slices() {}
DEVICE void wait_for_slices() { emulation::meet_cluster(); }
DEVICE void send_to_rank(float* mine, uint64_t* barrier, int rank, float v) {
  if (emulation::cluster->size() == 1) v = NAN;  // an illegal instruction where no cluster was launched
  *const_cast<float*>(emulation::of_rank(mine, rank)) = v;
  barrier_change(const_cast<uint64_t*>(emulation::of_rank(barrier, rank)), 0, -4);
}
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
// All threads of all CTAs, in two parts. What the others learn is that this CTA runs and that its barriers in
// shared memory are made; nothing else is fenced.
DEVICE void arrive_at_slices() {
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed;" ::: "memory");
}
DEVICE void wait_for_slices() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// To where `mine` lies in the CTA `rank` of the cluster, whose barrier learns of it. Who sends may end.
DEVICE void send_to_rank(float* mine, uint64_t* barrier, int rank, float v) {
  uint32_t to, bell;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bell) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(float_bits(v)), "r"(bell)
               : "memory");
}
#endif
