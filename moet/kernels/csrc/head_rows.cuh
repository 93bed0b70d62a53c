// Attention whose heads, at most 64, are the rows of matrix instructions: what two warpgroups make of tiles of
// 64 keys in shared memory, each with all keys and its half of 512 values. A tile is summed by itself, relative
// to its own maximum, and tiles are joined in ascending order.
#pragma once
#include "attention_tile.cuh"

#if MOET_SM == 90  // others have no room for a tile of keys

constexpr int KEYS = 64, BLOCK_BYTES = KEYS * 128;  // of 64 columns

// Two e4m3 codes in the upper bytes of halves: their fields as those of bf16, 2^120 too low, then the factor.
DEVICE uint32_t decode_two(uint32_t codes, uint32_t factor) {
  return multiply_bf16x2((codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u), factor);
}
DEVICE uint4 decode_e4m3(uint32_t low, uint32_t high, uint32_t factor) {
  return {decode_two(permute(low, 0, 0x1404), factor), decode_two(permute(low, 0, 0x3424), factor),
          decode_two(permute(high, 0, 0x1404), factor), decode_two(permute(high, 0, 0x3424), factor)};
}
// A thread's part: rows g and g + 8 of its warp's sixteen heads. BLOCKS: 64 columns each, of queries and keys.
template <int BLOCKS>
struct HeadRows {
  int lane, warp, group;
  float acc[4][32], top[2], total[2];

  DEVICE void clear() {
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
      for (int i = 0; i < 32; i++) acc[b][i] = 0.0f;
    top[0] = top[1] = bits_float(0xFF800000u), total[0] = total[1] = 0.0f;
  }

  // A warp is done with what a barrier guards.
  DEVICE void leave(uint64_t* barrier) const {
    sync_warp();
    if (lane == 0) barrier_arrive(barrier);
  }

  // Weights of a tile's keys as the A operand, [key / 16][4]; the first `count` keys exist.
  DEVICE void weigh(float* logits, int count, float scale, uint32_t (*weights)[4], float* part_top,
                    float* part_total) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float highest = bits_float(0xFF800000u);
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& v = logits[4 * n + 2 * r + i];
          v = 8 * n + 2 * (lane & 3) + i < count ? mul_rn(v, scale) : bits_float(0xFF800000u);
          highest = larger(highest, v);
        }
      highest = larger(highest, shuffle_xor(highest, 2));
      highest = larger(highest, shuffle_xor(highest, 1));
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        float a = exp2_approx(add_rn(logits[4 * n + 2 * r], -highest));
        float b = exp2_approx(add_rn(logits[4 * n + 2 * r + 1], -highest));
        sum = n ? add_rn(add_rn(sum, a), b) : add_rn(a, b);
        weights[n / 2][n % 2 * 2 + r] = to_bf16(a) | static_cast<uint32_t>(to_bf16(b)) << 16;
      }
      sum = add_rn(sum, shuffle_xor(sum, 2));
      part_total[r] = add_rn(sum, shuffle_xor(sum, 1));
      part_top[r] = highest;
    }
  }

  // Of a row's last tile the queries are free for others once they have met the keys.
  DEVICE void attend_tile(const uint8_t* queries, const uint8_t* keys, int count, float scale, bool last,
                          uint64_t* queries_done, uint64_t* done) {
    float part[32], part_top[2], part_total[2], old[2], fresh[2];
    uint32_t weights[4][4];
    mma_begin();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_rows(part, queries + b * BLOCK_BYTES, keys + b * BLOCK_BYTES, k, b + k > 0);
    mma_commit();
    mma_wait<0>();
    results_are_here<32>(part);
    if (last) leave(queries_done);
    weigh(part, count, scale, weights, part_top, part_total);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = larger(top[r], part_top[r]);
      old[r] = exp2_approx(add_rn(top[r], -higher)), fresh[r] = exp2_approx(add_rn(part_top[r], -higher));
      total[r] = fma_rn(fresh[r], part_total[r], mul_rn(old[r], total[r]));
      top[r] = higher;
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
      mma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_columns(part, weights[k], keys + (group * 4 + b) * BLOCK_BYTES, k, k > 0);
      mma_commit();
      mma_wait<0>();
      results_are_here<32>(part);
      if (b == 3) leave(done);
#pragma unroll
      for (int i = 0; i < 32; i++)
        acc[b][i] = fma_rn(fresh[i >> 1 & 1], part[i], mul_rn(old[i >> 1 & 1], acc[b][i]));
    }
  }

  // 64 columns of a warp's heads: four lanes exchange pairs, so that each stores eight columns at once.
  DEVICE void store(uint16_t* out, int row, int heads, int b, const float* v) const {
    int t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32_t w[4], got[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float* pair = v + 4 * (4 * half + n) + 2 * r;
          w[n] = to_bf16(pair[0]) | static_cast<uint32_t>(to_bf16(pair[1])) << 16;
        }
        // Lane t ends with columns 8 t .. 8 t + 7: a word from each of the four.
#pragma unroll
        for (int step = 0; step < 4; step++) {
          int want = t ^ step;
          uint32_t mine = want == 0 ? w[0] : want == 1 ? w[1] : want == 2 ? w[2] : w[3];
          uint32_t theirs = step ? shuffle(mine, lane ^ step) : mine;
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (want == j) got[j] = theirs;
        }
        int head = warp * 16 + (lane >> 2) + 8 * r;
        uint16_t* to = out + (uint64_t(row) * heads + head) * 512 + (group * 4 + b) * 64 + half * 32 + t * 8;
        if (heads == 64 || head < heads) *reinterpret_cast<uint4*>(to) = {got[0], got[1], got[2], got[3]};
      }
  }
};
#endif
