// Matrix instructions on bf16 tiles in shared memory: blocks of 64 columns, each [64 rows][128 bytes],
// whose sixteen-byte pieces are swizzled by row: piece c of row r lies at place c ^ (r & 7). sm_90a alone.
#pragma once
#include "tile.cuh"

DEVICE float maximum(float a, float b) { return fmaxf(a, b); }  // one instruction; of numbers, as larger

#ifdef MOET_EMULATE
namespace emulation {
inline double swizzled(const uint8_t* block, int row, int column) {
  const uint8_t* p = block + row * 128 + (((column >> 3) ^ (row & 7)) << 4) + (column & 7) * 2;
  return bf16(p[0] | p[1] << 8);
}
}  // namespace emulation
DEVICE void multiply_rows(float* d, const uint8_t* a, const uint8_t* b, int at, int k, int add) {
  auto& offer = emulation::mine();
  offer.d = d;
  int first = (threadIdx.x >> 5 & 3) * 16;
  emulation::meet([=](emulation::Offer* o) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 32; i++) {
        int row = first + (lane >> 2) + 8 * (i >> 1 & 1), column = i / 4 * 8 + 2 * (lane & 3) + (i & 1);
        double sum = add ? o[lane].d[i] : 0.0;
        for (int j = 0; j < 16; j++)
          sum += emulation::swizzled(a + at, row, 16 * k + j) * emulation::swizzled(b + at, column, 16 * k + j);
        o[lane].d[i] = float(sum);
      }
  });
}
DEVICE void multiply_columns(float* d, const uint32_t* a, const uint8_t* b, int at, int k, int add) {
  auto& offer = emulation::mine();
  memcpy(offer.a, a, 16);
  offer.d = d;
  emulation::meet([=](emulation::Offer* o) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 32; i++) {
        int row = (lane >> 2) + 8 * (i >> 1 & 1), column = i / 4 * 8 + 2 * (lane & 3) + (i & 1);
        double sum = add ? o[lane].d[i] : 0.0;
        for (int j = 0; j < 16; j++)
          sum += emulation::a_element<BF16>(o, row, j) * emulation::swizzled(b + at, 16 * k + j, column);
        o[lane].d[i] = float(sum);
      }
  });
}
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float exp2_approx(float v) { return exp2f(v); }
DEVICE float div_full(float a, float b) { return a / b; }
DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t low = to_bf16(emulation::bf16(a & 0xFFFF) * emulation::bf16(b & 0xFFFF));
  return low | static_cast<uint32_t>(to_bf16(emulation::bf16(a >> 16) * emulation::bf16(b >> 16))) << 16;
}
#else
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float div_full(float a, float b) {
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
#if MOET_SM == 90
// Eight rows of 128 bytes are 1,024 apart; the swizzle is of 128 bytes.
DEVICE BOperand swizzled_operand(const uint8_t* block, uint32_t bytes) {
  return {(shared_address(block) + bytes) >> 4 & 0x3FFF, 1024 >> 4 | 1u << 30};
}
// d[64 x 64] (+)= 16 columns, from 16 k on, of a's rows times those of b's, `at` bytes into both. One address
// is made a descriptor, to which all that is known ahead is added: it is half of a matrix instruction's cost.
DEVICE void multiply_rows(float* d, const uint8_t* a, const uint8_t* b, int at, int k, int add) {
  uint64_t rows = b_advance(swizzled_operand(a, 0), at + 32 * k).descriptor();
  uint64_t others = b_advance(swizzled_operand(b, 0), at + 32 * k).descriptor();
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" D7
               "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
               : ACC16(d, 0), ACC16(d, 16)
               : "l"(rows), "l"(others), "r"(add));
}
// d[64 x 64] (+)= a[64 x 16] times the rows of b from 16 k on, `at` bytes into it.
DEVICE void multiply_columns(float* d, const uint32_t* a, const uint8_t* block, int at, int k, int add) {
  BOperand b = b_advance(swizzled_operand(block, 0), at + 2048 * k);
  WIDE(n64, "k16.f32.bf16.bf16", ", 1", D7, 32, 33, 34, 35, 36, 37, ACC16(d, 0), ACC16(d, 16));
}
#endif
#endif
