// Counters in device memory by which the CTAs of one launch wait for each other, and loads that see
// what another CTA, or an overlapped kernel, has written. All CTAs of such a launch must fit at once.
#pragma once
#include "device.cuh"

#ifdef MOET_EMULATE
#define COOPERATING(name, Args, threads)                                                           \
  extern "C" int emulate_##name(const Args* args, int grid_x, int grid_y, int shared_bytes) {      \
    return emulation::run_together(grid_x * grid_y, threads, shared_bytes, [=] { name(*args); });  \
  }
DEVICE void add_released(uint32_t* p, uint32_t v) { *p += v; }
DEVICE uint32_t add_ordered(uint32_t* p, uint32_t v) { return atomic_add(p, v); }
DEVICE bool wait_until(const uint32_t* p, uint32_t value) {
  while (*p != value) emulation::pause(emulation::SPIN);
  return true;
}
DEVICE uint4 load_fresh(const uint4* p) { return *p; }
DEVICE uint32_t load_fresh(const uint32_t* p) { return *p; }
DEVICE uint16_t load_fresh(const uint16_t* p) { return *p; }
DEVICE float load_fresh(const float* p) { return *p; }
#else
#define COOPERATING(name, Args, threads)
// Adds once everything that this thread, and what it has met at a barrier, wrote is visible.
DEVICE void add_released(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// As add_released, and sees all that was released before it. Returns the value before.
DEVICE uint32_t add_ordered(uint32_t* p, uint32_t v) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
// Whether the counter came to the value before patience ended, after about half a second.
DEVICE bool wait_until(const uint32_t* p, uint32_t value) {
#pragma unroll 1
  for (int polls = 0; polls < (1 << 20); polls++) {
    uint32_t found;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(p) : "memory");
    if (found == value) return true;
  }
  return false;
}
DEVICE uint4 load_fresh(const uint4* p) { return __ldcg(p); }
DEVICE uint32_t load_fresh(const uint32_t* p) { return __ldcg(p); }
DEVICE uint16_t load_fresh(const uint16_t* p) { return __ldcg(p); }
DEVICE float load_fresh(const float* p) { return __ldcg(p); }
#endif
