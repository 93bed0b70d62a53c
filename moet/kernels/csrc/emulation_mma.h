// The matrix instructions of mma.cuh on a CPU, operand by operand where the lanes hold them.
#pragma once
#include "codec.cuh"

namespace emulation {
template <int CODEC>
inline double a_element(const Offer* o, int row, int k) {
  constexpr int half_k = CODEC == BF16 ? 8 : 16, per_register = CODEC == BF16 ? 2 : 4;
  int lane = 4 * (row & 7) + k % half_k / per_register, r = (row >> 3) + 2 * (k / half_k);
  uint32_t word = o[lane].a[r];
  if (CODEC == BF16) return bf16(word >> (16 * (k & 1)));
  uint8_t byte = word >> (8 * (k & 3));
  return CODEC == FP8 ? e4m3(byte) : e5m2(byte);
}
template <int CODEC, typename B, typename Scale>
inline void multiply(Offer* o, int groups, int add, B b_element, Scale scale) {
  constexpr int K = CODEC == BF16 ? 16 : 32;
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4 * groups; i++) {
      int row = (lane >> 2) + 8 * (i >> 1 & 1), column = 2 * (lane & 3) + (i & 1);
      double sum = 0;
      for (int k = 0; k < K; k++) sum += a_element<CODEC>(o, row, k) * b_element(i / 4, k, column);
      float* d = o[lane].d + i;
      *d = float((add ? double(*d) : 0.0) + sum * scale(row));
    }
}
}  // namespace emulation

#if MOET_SM == 90
struct BOperand {
  const uint8_t* shared;
  uint32_t group_bytes;
};
DEVICE BOperand b_operand(const uint8_t* shared, uint32_t group_bytes) { return {shared, group_bytes}; }
DEVICE BOperand b_advance(BOperand b, uint32_t bytes) { return {b.shared + bytes, b.group_bytes}; }

template <int CODEC, int NT>
DEVICE void mma(float* d, const uint32_t* a, BOperand b, int add) {
  auto& offer = emulation::mine();
  memcpy(offer.a, a, 16);
  offer.d = d;
  emulation::meet([=](emulation::Offer* o) {
    auto b_element = [=](int group, int k, int column) -> double {
      constexpr int bytes = CODEC == BF16 ? 2 : 1;
      const uint8_t* p = b.shared + group * b.group_bytes + k * bytes / 16 * 128 + column * 16 + k * bytes % 16;
      return CODEC == BF16 ? emulation::bf16(p[0] | p[1] << 8) : emulation::e4m3(*p);
    };
    emulation::multiply<CODEC>(o, NT, add, b_element, [](int) { return 1.0; });
  });
}
#else
struct BOperand {
  const uint8_t* lane;
  uint32_t group_bytes;
};
DEVICE BOperand b_operand(const uint8_t* shared, uint32_t group_bytes) {
  return {shared + (threadIdx.x & 31) * 4, group_bytes};
}
DEVICE BOperand b_advance(BOperand b, uint32_t bytes) { return {b.lane + bytes, b.group_bytes}; }

template <int CODEC, int BYTE, int PAIR>
DEVICE void mma_group(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, uint32_t scale) {
  auto& offer = emulation::mine();
  memcpy(offer.a, a, 16);
  offer.b[0] = b0, offer.b[1] = b1, offer.scale = scale, offer.d = d;
  emulation::meet([=](emulation::Offer* o) {
    auto b_element = [=](int, int k, int column) -> double {
      constexpr int half_k = CODEC == BF16 ? 8 : 16, per_register = CODEC == BF16 ? 2 : 4;
      uint32_t word = o[4 * column + k % half_k / per_register].b[k / half_k];
      return CODEC == BF16 ? emulation::bf16(word >> (16 * (k & 1))) : emulation::e4m3(word >> (8 * (k & 3)));
    };
    auto scale_of = [=](int row) {  // row g from lane 4g + 2 PAIR, row g + 8 from the next
      uint32_t byte = o[4 * (row & 7) + 2 * PAIR + (row >> 3)].scale >> (8 * BYTE) & 0xFF;
      return CODEC == BF16 ? 1.0 : ldexp(1.0, int(byte) - 127);
    };
    emulation::multiply<CODEC>(o, 1, 1, b_element, scale_of);
  });
}
#endif
DEVICE void mma_begin() {}
DEVICE void mma_commit() {}
template <int N>
DEVICE void mma_wait() {}
