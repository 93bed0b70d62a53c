// NVFP4 weights: e2m1 codes with an e4m3 scale per 16 columns, which no exponent can carry. Every
// matrix instruction therefore sums one block of 16 (the lanes of the other block bring zeros), and
// its four sums are multiplied with the block's scale. The order of the sums is part of the format's
// contract: blocks of a chunk in order by fused multiply-add, then the chunk times the row's scale.
#pragma once
#include "mma.cuh"

constexpr int NVFP4 = 4;  // after the codecs of codec.cuh

// Byte i of four e4m3 scales (never negative) as a float times 2^-120, exact. A block's sums are multiples
// of 2^-10 and so its products of 2^-139: none is rounded for being small.
DEVICE float small_scale(uint32_t word, int i) {
  uint32_t bits = i < 3 ? word << (20 - 8 * i) : word >> 4;
  return bits_float(bits & 0x07F00000u);
}
DEVICE float e4m3_scale(uint32_t word, int i) { return small_scale(word, i) * 0x1p120f; }

// What a codec keeps in registers throughout. NVFP4: the e5m2 bytes of the magnitudes, for decode_e2m1.
// Constants that the compiler knows are brought anew for each use; a shuffle's result stays where it is.
template <int CODEC>
struct TableOf {
  DEVICE explicit TableOf(const Masks&) {}
};
template <>
struct TableOf<NVFP4> {
  uint32_t low, high;
  DEVICE explicit TableOf(const Masks& masks) {
    uint32_t e = shuffle(masks.high ^ 0x88888888u, 0) + 14 * 0x04040404u;
    low = e2m1_low(e), high = e2m1_high(e);
  }
};

// One chunk of 128 columns: codes_words[8] of a lane, scale_word of the lane's place in the plane.
// Returns the chunk's sums, without activation and tensor scales. FEW: of up to four tokens, each of
// which has two columns of the matrix instruction, so that one brings both blocks: chunk[2], of rows g
// and g + 8. Otherwise zeros in the weights keep the blocks apart: chunk[4].
template <bool FEW>
DEVICE void nvfp4_chunk(const uint32_t* codes_words, uint32_t scale_word, const TableOf<NVFP4>& table, BOperand b,
                        float* chunk) {
  constexpr int PARTS = FEW ? 1 : 2;  // matrix instructions of a step
  int lane = threadIdx.x & 31;
  uint32_t low_block = lane & 2 ? 0u : ~0u;  // lanes with columns 0..15 of every 32
  uint32_t low = table.low, high = table.high;
#pragma unroll
  for (int i = 0; i < (FEW ? 2 : 4); i++) chunk[i] = 0.0f;
  uint32_t row0 = 0, row1 = 0, a[2][PARTS][4], before0 = 0, before1 = 0;
  float part[2][PARTS][4];
#pragma unroll
  for (int step = 0; step <= 4; step++) {  // of 32 columns: two blocks, summed while the next are decoded
    if (step < 4) {
      uint32_t(*blocks)[4] = a[step & 1];
      decode_e2m1(codes_words[2 * step], low, high, low, high, blocks[0]);
      decode_e2m1(codes_words[2 * step + 1], low, high, low, high, blocks[0] + 2);
      if constexpr (!FEW) {
#pragma unroll
        for (int i = 0; i < 4; i++) blocks[1][i] = blocks[0][i] & ~low_block, blocks[0][i] &= low_block;
      }
      mma_begin();
#pragma unroll
      for (int block = 0; block < PARTS; block++) {
#if MOET_SM == 90
        mma<MXFP4, 1>(part[step & 1][block], blocks[block], b_advance(b, 256 * step), 0);
#else
        mma_scaled<MXFP4, 1, 0, 0>(part[step & 1][block], blocks[block], b_advance(b, 256 * step), 0, 0x7F7F7F7Fu);
#endif
      }
      mma_commit();
      if (step % 2 == 0) {  // one scale word a row for 64 columns
        before0 = row0, before1 = row1;
        row0 = shuffle(scale_word, (lane & ~3) + step);
        row1 = shuffle(scale_word, (lane & ~3) + step + 1);
      }
    }
    if (step == 0) continue;
    if (step < 4) mma_wait<1>();
    else mma_wait<0>();
    bool earlier = step == 2;  // its word has just been replaced
#pragma unroll
    for (int block = 0; block < 2; block++) {
      const float* sums = part[(step - 1) & 1][FEW ? 0 : block];
      int of_word = 2 * ((step - 1) & 1) + block;
      float s0 = small_scale(earlier ? before0 : row0, of_word), s1 = small_scale(earlier ? before1 : row1, of_word);
      if constexpr (FEW) {
        chunk[0] = fma_rn(sums[block], s0, chunk[0]);
        chunk[1] = fma_rn(sums[2 + block], s1, chunk[1]);
      } else {
        chunk[0] = fma_rn(sums[0], s0, chunk[0]);
        chunk[1] = fma_rn(sums[1], s0, chunk[1]);
        chunk[2] = fma_rn(sums[2], s1, chunk[2]);
        chunk[3] = fma_rn(sums[3], s1, chunk[3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < (FEW ? 2 : 4); i++) chunk[i] *= 0x1p120f;
}
// On both arches magnitude 1 decodes to 2^0 with e = 14: nothing to undo.
