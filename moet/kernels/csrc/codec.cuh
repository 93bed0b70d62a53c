// Stored codes -> the matrix unit's A operand: four registers of 8-bit floats per 16 x 32 weights.
// The word layouts are those of moet/kernels/layout.py. Plain integer C++, the same on every target.
#pragma once
#include "device.cuh"

enum Codec { W2, MXFP4, FP8, BF16 };

// A chunk is what four matrix instructions read: 128 columns (BF16: 64).
DEVICE constexpr int chunk_bytes(int codec) { return codec == W2 ? 512 : codec == MXFP4 ? 1024 : 2048; }
DEVICE constexpr int chunk_columns(int codec) { return codec == BF16 ? 64 : 128; }
// Chunks that travel together; one scale word of a lane covers two.
DEVICE constexpr int chunks_per_stage(int codec) { return codec == W2 ? 4 : 2; }
DEVICE constexpr bool has_scale_plane(int codec) { return codec == W2 || codec == MXFP4; }

// Opaque constants: as literals ptxas would split each LOP3 in two. They come as kernel parameters.
struct Masks {
  uint32_t high;     // 0x88888888
  uint32_t w2_base;  // 0x44444444
};

// max(a - b, 0) for each of four bytes.
DEVICE uint32_t saturating_subtract(uint32_t a, uint32_t b) {
  const uint32_t H = 0x80808080u;
  uint32_t t = (a | H) - (b & ~H);
  uint32_t keep = permute((a & ~b) | (~(a ^ b) & t), 0, 0xBA98);  // bytes 0xFF where a >= b
  return (t ^ ((a ^ ~b) & H)) & keep;
}

// sm_90a: exponents e0 (row g) and e1 (row g + 8) ride in the words: value 2^(e-15) or 2^(e-13).
DEVICE void decode_w2_scaled(uint32_t word, uint32_t e0, uint32_t e1, uint32_t* a) {
  a[0] = (word & 0x88888888u) + e0;
  a[1] = masked_multiply_add<0x44444444u, 2>(word, e1);
  a[2] = masked_multiply_add<0x22222222u, 4>(word, e0);
  a[3] = masked_multiply_add<0x11111111u, 8>(word, e1);
}

// sm_120a: the block scale goes to the matrix unit; values are 4 and 16, so the result is 4 times.
DEVICE void decode_w2(uint32_t word, uint32_t high, uint32_t base, uint32_t* a) {
  a[0] = (word & high) | base;
  a[1] = ((word << 1) & high) | base;
  a[2] = ((word << 2) & high) | base;
  a[3] = ((word << 3) & high) | base;
}

// Eight e2m1 codes -> registers 2h and 2h + 1. lo/hi: e5m2 bytes of magnitudes 0, .5, 1, 1.5 and
// 2, 3, 4, 6 for the row of each register.
DEVICE void decode_e2m1(uint32_t word, uint32_t lo0, uint32_t hi0, uint32_t lo1, uint32_t hi1,
                        uint32_t* a) {
  uint32_t magnitude = word & 0x77777777u;
  a[0] = permute(lo0, hi0, magnitude) | (word & 0x80808080u);
  a[1] = permute(lo1, hi1, magnitude >> 16) | ((word << 4) & 0x80808080u);
}
// e: 4 * F replicated in four bytes, where magnitude 1 gets e5m2 exponent F + 1 (value 2^(F-14)).
DEVICE uint32_t e2m1_low(uint32_t e) { return (e & 0xFFFFFF00u) + 0x06040000u; }
DEVICE uint32_t e2m1_high(uint32_t e) { return e + 0x0E0C0A08u; }

// 2^e as a float; e in -126..127.
DEVICE float power_of_two(int e) { return bits_float(static_cast<uint32_t>(e + 127) << 23); }

// Power-of-two activation scale of the checkpoints' recipe: 2^ceil(log2(max(amax, 1e-4) / 448)).
DEVICE int activation_exponent(float amax) {
  uint32_t bits = float_bits(amax < 1e-4f ? 1e-4f : amax);  // 448 is 1.75 * 2^8
  return static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFFu) > 0x600000u);
}

DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE float round_to_bf16(float v) { return bits_float(static_cast<uint32_t>(to_bf16(v)) << 16); }

// 32 bf16 values as 16 words of two; zeros unless valid.
DEVICE void load_bf16x32(const uint16_t* from, bool valid, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = {0, 0, 0, 0};
    if (valid) v = reinterpret_cast<const uint4*>(from)[i];
    words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
  }
}
DEVICE float largest_of(const uint32_t* words) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    amax = larger(amax, bits_float((words[i] << 16) & 0x7FFFFFFFu));
    amax = larger(amax, bits_float(words[i] & 0x7FFF0000u));
  }
  return amax;
}
// 32 bf16 values times inverse -> e4m3 in MMA order: the even words in a, the odd ones in b.
DEVICE void quantise_words(const uint32_t* words, float inverse, uint4& a, uint4& b) {
  uint32_t q[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t lo = to_e4m3x2(bits_float(words[2 * i] << 16) * inverse,
                            bits_float(words[2 * i] & 0xFFFF0000u) * inverse);
    uint32_t hi = to_e4m3x2(bits_float(words[2 * i + 1] << 16) * inverse,
                            bits_float(words[2 * i + 1] & 0xFFFF0000u) * inverse);
    q[i] = lo | (hi << 16);
  }
  a = {q[0], q[2], q[4], q[6]};
  b = {q[1], q[3], q[5], q[7]};
}
