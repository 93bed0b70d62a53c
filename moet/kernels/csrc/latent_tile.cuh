// Products whose rows are keys, then values, and whose columns are heads: tiles as attention_tile.cuh has them.
#pragma once
#include "attention_tile.cuh"

#ifdef MOET_EMULATE
// d[64 x 32] (+)= the sums over 16 of left(row, j) * right(j, column).
template <class Left, class Right>
void multiply_narrow(float* d, int add, Left left, Right right) {
  auto& offer = emulation::mine();
  offer.d = d;
  int first = (threadIdx.x >> 5 & 3) * 16;
  emulation::meet([=](emulation::Offer* o) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 16; i++) {
        int row = first + (lane >> 2) + 8 * (i >> 1 & 1), column = i / 4 * 8 + 2 * (lane & 3) + (i & 1);
        double sum = add ? o[lane].d[i] : 0.0;
        for (int j = 0; j < 16; j++) sum += left(row, j) * right(j, column);
        o[lane].d[i] = float(sum);
      }
  });
}
DEVICE void multiply_keys(float* d, const uint8_t* keys, const uint8_t* queries, int k, int add) {
  multiply_narrow(
      d, add, [=](int row, int j) { return emulation::swizzled(keys, row, 16 * k + j); },
      [=](int j, int column) { return emulation::swizzled(queries, column, 16 * k + j); });
}
DEVICE void multiply_values(float* d, const uint8_t* values, const uint8_t* weights, int k, int add) {
  multiply_narrow(
      d, add, [=](int row, int j) { return emulation::swizzled(values, 16 * k + j, row); },
      [=](int j, int column) { return emulation::swizzled(weights, column, 16 * k + j); });
}
#elif MOET_SM == 90
#define NARROW(turned)                                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " \
               "{" D3 "}, %16, %17, p, 1, 1, " turned ", 0;\n}\n"                                          \
               : ACC16(d, 0)                                                                             \
               : "l"(left), "l"(right), "r"(add))
// d[64 x 32] (+)= 16 columns, from 16 k on, of keys' rows times those of queries'.
DEVICE void multiply_keys(float* d, const uint8_t* keys, const uint8_t* queries, int k, int add) {
  uint64_t left = swizzled_operand(keys, 32 * k).descriptor(), right = swizzled_operand(queries, 32 * k).descriptor();
  NARROW("0");
}
// d[64 x 32] (+)= 16 rows of values, from 16 k on, as columns, times as many columns of weights' rows.
DEVICE void multiply_values(float* d, const uint8_t* values, const uint8_t* weights, int k, int add) {
  uint64_t left = swizzled_operand(values, 2048 * k).descriptor();
  uint64_t right = swizzled_operand(weights, 32 * k).descriptor();
  NARROW("1");
}
#undef NARROW
#endif
