// Asks for weights that a later kernel of the step will read, so that memory works while small
// kernels do not: they lie in the second-level cache when they are wanted. Writes nothing.
#include "device.cuh"

constexpr int FETCH_THREADS = 32;
constexpr int FETCH_BYTES = 8192, RANGES = 4;

struct FetchArgs {
  const uint8_t* from[RANGES];  // each a multiple of 16, as are the bytes; null: none
  uint64_t bytes[RANGES];
  int at_once;  // ask before the kernel ahead has ended
};

#ifdef MOET_EMULATE
DEVICE void fetch_to_cache(const void*, uint32_t) {}
#else
DEVICE void fetch_to_cache(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#endif

KERNEL(FETCH_THREADS, 8) fetch_ahead(GRID_CONSTANT FetchArgs p) {
  if (!p.at_once) wait_for_previous_kernel();
  let_next_kernel_start();
  uint64_t first = (uint64_t(blockIdx.x) * FETCH_THREADS + threadIdx.x) * FETCH_BYTES;
  uint64_t step = uint64_t(gridDim.x) * FETCH_THREADS * FETCH_BYTES;
#pragma unroll
  for (int r = 0; r < RANGES; r++) {
    for (uint64_t at = first; at < p.bytes[r]; at += step) {
      uint64_t left = p.bytes[r] - at;
      fetch_to_cache(p.from[r] + at, left < FETCH_BYTES ? static_cast<uint32_t>(left) : FETCH_BYTES);
    }
  }
  if (p.at_once) wait_for_previous_kernel();  // whoever waits for this kernel waits for those before it
}
LAUNCHABLE(fetch_ahead, FetchArgs, FETCH_THREADS)
