// Reads a buffer once and keeps nothing: the memory's read rate, against which others are stated.
#include "device.cuh"

struct ReadArgs {
  const uint4* from;
  uint32_t* sink;
  uint64_t count;  // of 16-byte words, a multiple of grid * 512 * 8
};

KERNEL(512, 3) read_buffer(GRID_CONSTANT ReadArgs args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  uint64_t step = uint64_t(gridDim.x) * 512;
  uint32_t mixed = 0;
  for (uint64_t i = uint64_t(blockIdx.x) * 512 + threadIdx.x; i < args.count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = load_streaming(args.from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; j++) mixed ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (mixed == 0x12345678u) *args.sink = mixed;  // keeps the loads
}
LAUNCHABLE(read_buffer, ReadArgs, 512)
