// Attention whose heads, at most 64, are the rows of matrix instructions: what two warpgroups make of tiles of
// 64 keys in shared memory, each with all keys and its half of 512 values. A tile is summed by itself, relative
// to its own maximum, and tiles are joined in ascending order.
#pragma once
#include "attention_tile.cuh"

#if MOET_SM == 90  // others have no room for a tile of keys

constexpr int KEYS = 64, BLOCK_BYTES = KEYS * 128;  // of 64 columns
#ifdef MOET_DEBUG
constexpr int LEAVING = 32;  // lanes of a warp that arrive when it leaves
#else
constexpr int LEAVING = 1;
#endif
// A warp is done with what a barrier guards; in the debug build every lane says so, which race checkers follow.
DEVICE void leave(uint64_t* barrier, int lane) {
  sync_warp();
  if (LEAVING == 32 || lane == 0) barrier_arrive(barrier);
}

// Two e4m3 codes, each with eight bits of its sign above: their fields as those of bf16, 2^120 too low, then the
// factor.
DEVICE uint32_t decode_two(uint32_t codes, uint32_t factor) {
  return multiply_bf16x2(codes << 4 & 0x87F087F0u, factor);
}
DEVICE uint4 decode_e4m3(uint32_t low, uint32_t high, uint32_t factor) {
  return {decode_two(permute(low, 0, 0x9180), factor), decode_two(permute(low, 0, 0xB3A2), factor),
          decode_two(permute(high, 0, 0x9180), factor), decode_two(permute(high, 0, 0xB3A2), factor)};
}
// A tile's keys as heads g and g + 8 weigh them: weights as the A operand, [key / 16][4], the largest logit and the
// weights' sum.
struct Weighed {
  uint32_t weights[4][4];
  float top[2], total[2];
};
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

  // The first `count` keys of a tile exist. scale: positive, so that the largest logit is that of the largest
  // product.
  DEVICE void weigh(float* logits, int count, float scale, Weighed& w) const {
    if (count < KEYS) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + (i & 1) + 2 * (lane & 3) >= count) logits[i] = bits_float(0xFF800000u);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float* v = logits + 2 * r;
      float high[4];
#pragma unroll
      for (int n = 0; n < 4; n++)
        high[n] = maximum(maximum(v[8 * n], v[8 * n + 1]), maximum(v[8 * n + 4], v[8 * n + 5]));
      float highest = maximum(maximum(high[0], high[1]), maximum(high[2], high[3]));
      highest = maximum(highest, shuffle_xor(highest, 2));
      highest = mul_rn(maximum(highest, shuffle_xor(highest, 1)), scale);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        float a = exp2_approx(add_rn(mul_rn(v[4 * n], scale), -highest));
        float b = exp2_approx(add_rn(mul_rn(v[4 * n + 1], scale), -highest));
        sum = n ? add_rn(add_rn(sum, a), b) : add_rn(a, b);
        w.weights[n / 2][n % 2 * 2 + r] = to_bf16(a) | static_cast<uint32_t>(to_bf16(b)) << 16;
      }
      sum = add_rn(sum, shuffle_xor(sum, 2));
      w.total[r] = add_rn(sum, shuffle_xor(sum, 1));
      w.top[r] = highest;
    }
  }

  // Of a row's last tile the queries are free for others once they have met the keys.
  DEVICE void weigh_tile(const uint8_t* queries, const uint8_t* keys, int count, float scale, bool last,
                         uint64_t* queries_done, Weighed& w) const {
    float logits[32];
    mma_begin();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_rows(logits, queries, keys, b * BLOCK_BYTES, k, b + k > 0);
    mma_commit();
    mma_wait<0>();
    results_are_here<32>(logits);
    if (last) leave(queries_done, lane);
    weigh(logits, count, scale, w);
  }

  // Joins a tile to those before it.
  DEVICE void join_tile(const uint8_t* keys, const Weighed& w, uint64_t* done) {
    float part[32], old[2], fresh[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = maximum(top[r], w.top[r]);
      old[r] = exp2_approx(add_rn(top[r], -higher)), fresh[r] = exp2_approx(add_rn(w.top[r], -higher));
      total[r] = fma_rn(fresh[r], w.total[r], mul_rn(old[r], total[r]));
      top[r] = higher;
    }
    const uint8_t* values = keys + group * (4 * BLOCK_BYTES);
#pragma unroll
    for (int b = 0; b < 4; b++) {
      mma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_columns(part, w.weights[k], values, b * BLOCK_BYTES, k, k > 0);
      mma_commit();
      mma_wait<0>();
      results_are_here<32>(part);
      if (b == 3) leave(done, lane);
#pragma unroll
      for (int i = 0; i < 32; i++)
        acc[b][i] = fma_rn(fresh[i >> 1 & 1], part[i], mul_rn(old[i >> 1 & 1], acc[b][i]));
    }
  }

  // 64 columns of a warp's heads: neighbouring lanes exchange pairs, so that four lanes store a sector.
  DEVICE void store(uint16_t* out, int row, int heads, int b, const float* v) const {
    bool odd = lane & 1;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = warp * 16 + (lane >> 2) + 8 * r;
      uint16_t* to = out + (uint64_t(row) * heads + head) * 512 + (group * 4 + b) * 64 + odd * 8 + (lane & 2) * 2;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float *p = v + 8 * n + 2 * r, *q = p + 4;
        uint32_t first = to_bf16(p[0]) | static_cast<uint32_t>(to_bf16(p[1])) << 16;
        uint32_t second = to_bf16(q[0]) | static_cast<uint32_t>(to_bf16(q[1])) << 16;
        uint32_t theirs = shuffle(odd ? first : second, lane ^ 1);
        uint2 pair = {odd ? theirs : first, odd ? second : theirs};
        if (heads == 64 || head < heads) *reinterpret_cast<uint2*>(to + 16 * n) = pair;
      }
    }
  }
};
#endif
