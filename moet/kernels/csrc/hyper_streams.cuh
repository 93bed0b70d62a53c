// What all kernels of hyper_connection.cu share: their arguments, and the arithmetic of a row.
//
// A block is 128 channels of all streams. A row's product with fn is summed within a block by one
// lane order and tree, over the blocks in ascending order, whichever kernel does it: a row's bits do
// not depend on how many rows there are.
#pragma once
#include "codec.cuh"
#include "grid_sync.cuh"

constexpr int MULT = 4, BLOCK = 128;
constexpr int PARTS = 32;      // fn rows of a block's sums; the last is the sum of squares
constexpr int MAX_GROUPS = 2;  // of 8 channels, of a thread: dim <= 4096
constexpr int MAX_OUTS = MULT * (2 + MULT);
constexpr int MAX_PARTS = 8;   // of a row's y

struct StreamsArgs {
  const uint16_t* y;        // [rows, dim] bf16; null: the streams stay
  const uint16_t* streams;  // [rows, 4, dim] bf16
  const float* post;        // [rows, 4]
  const float* mix;         // [rows, 4, 4]
  const float* fn;          // [outs, 4 * dim]
  const float* base;        // [outs]
  const float* scale;       // [3]; a head: [1]
  const float* weight;      // [dim]
  uint16_t* mixed;          // [rows, 4, dim]; the streams if they stay
  float* partial;           // [rows, blocks, PARTS]
  uint32_t* counters;       // [grid y], zero between launches; null: sums only
  uint16_t* x;              // [rows, dim] bf16
  uint8_t* codes;           // [rows, dim] e4m3 in MMA order; or null
  float* code_scale;        // [rows, dim / 128]
  float* next_post;         // [rows, 4]; null: a head, which has no gates but the first
  float* next_mix;          // [rows, 4, 4]
  float norm_eps, hc_eps;
  int rows, rows_each, dim, outs, iters;
  // Of kernels that are mixed: y is the sum of a row's parts, weighed, in their order, and of `shared`,
  // rounded once, as combine_experts of moe.cu makes it.
  const uint16_t* parts;      // [rows * top_k, dim]
  const float* part_weights;  // [rows * top_k], or null
  const uint16_t* shared;     // [rows, dim]
  const int64_t* expert_ids;  // [rows, top_k]; a first one below 0: the row has no parts
  int top_k;                  // at most MAX_PARTS
  // Of kernels that tell.
  uint64_t* told;    // [blocks, PARTS], zero between launches: a sum and, in the upper half, 1
  int takes_logits;  // 1: mix is not balanced yet, as next_mix never is
};

DEVICE float low(uint32_t pair) { return bits_float(pair << 16); }
DEVICE float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }
DEVICE uint32_t packed(float lo, float hi) { return to_bf16(lo) | static_cast<uint32_t>(to_bf16(hi)) << 16; }
DEVICE float sigmoid(float v) { return div_rn(1.0f, 1.0f + exp_precise(-v)); }

#ifdef MOET_EMULATE
DEVICE float reciprocal(float v) { return div_approx(1.0f, v); }
DEVICE uint2 load_fresh(const uint2* p) { return *p; }
DEVICE void store_whole(uint2* p, uint2 v) { *p = v; }
DEVICE uint32_t packed_at_once(float lo, float hi) { return packed(lo, hi); }
#else
DEVICE uint2 load_fresh(const uint2* p) { return __ldcg(p); }
// One instruction each, where the compiler may make two of it.
DEVICE uint32_t packed_at_once(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE void store_whole(uint2* p, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
// div_approx(1, v) bit for bit for v from 2^-126 to 2^126, which it need not look at.
DEVICE float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
#endif

// Four channels of a row.
struct Four {
  float v[4];
};
DEVICE Four unpack_four(uint2 u) { return {{low(u.x), high(u.x), low(u.y), high(u.y)}}; }

// A stream of a row from the old ones. column: its own of the mixing matrix.
DEVICE Four mix_unrounded(const uint2* old, uint2 y, float gate, const float* column) {
  Four sum = unpack_four(y);
#pragma unroll
  for (int i = 0; i < 4; i++) sum.v[i] *= gate;
#pragma unroll
  for (int j = 0; j < MULT; j++) {
    Four stream = unpack_four(old[j]);
    float m = column[j * MULT];
#pragma unroll
    for (int i = 0; i < 4; i++) sum.v[i] = fma_rn(stream.v[i], m, sum.v[i]);
  }
  return sum;
}
DEVICE uint2 mix_four(const uint2* old, uint2 y, float gate, const float* column) {
  Four sum = mix_unrounded(old, y, gate, column);
  return {packed(sum.v[0], sum.v[1]), packed(sum.v[2], sum.v[3])};
}

// Four channels, past the cache of this SM: kernels that tell read ahead of their wait, too.
DEVICE uint2 load_pairs(const uint16_t* p) { return load_fresh(reinterpret_cast<const uint2*>(p)); }

// Four channels of y before they are one.
struct Parts {
  uint2 part[MAX_PARTS], shared;
};
struct Shares {
  float weight[MAX_PARTS];
  int choices;
};
DEVICE uint2 add_parts(const Parts& parts, const Shares& s) {
  Four sum = {};
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    if (k >= s.choices) continue;
    Four v = unpack_four(parts.part[k]);
#pragma unroll
    for (int i = 0; i < 4; i++) sum.v[i] = k ? add_rn(sum.v[i], v.v[i] * s.weight[k]) : v.v[i] * s.weight[k];
  }
  Four v = unpack_four(parts.shared);
#pragma unroll
  for (int i = 0; i < 4; i++) sum.v[i] = add_rn(sum.v[i], v.v[i]);
  return {packed(sum.v[0], sum.v[1]), packed(sum.v[2], sum.v[3])};
}

// Four channels of y from its parts. All of them are read before any is added.
DEVICE uint2 sum_of_parts(const StreamsArgs& p, int row, int channel) {
  Shares s;
  Parts parts;
  int first = row * p.top_k;
  s.choices = load_fresh(reinterpret_cast<const uint32_t*>(p.expert_ids + first) + 1) >> 31 ? 0 : p.top_k;
  parts.shared = load_pairs(p.shared + uint64_t(row) * p.dim + channel);
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    parts.part[k] = {0, 0}, s.weight[k] = 1.0f;
    if (k >= p.top_k) continue;
    parts.part[k] = load_pairs(p.parts + uint64_t(first + k) * p.dim + channel);
    if (p.part_weights) s.weight[k] = load_fresh(p.part_weights + first + k);
  }
  return add_parts(parts, s);
}

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v = add_rn(v, shuffle_xor(v, step));
  return v;
}

// Of a row of fn, from its sum in this lane and the squares in the last.
DEVICE float mixing_logit(const StreamsArgs& p, float total) {
  float square = bits_float(shuffle(float_bits(total), PARTS - 1));
  return total * div_rn(1.0f, sqrt_rn(square / static_cast<float>(MULT * p.dim) + p.norm_eps));
}

// Row softmax, then columns and rows in turn; ends on columns. In one thread's registers.
DEVICE void balance(float* m, float eps, int iters) {
#pragma unroll
  for (int r = 0; r < MULT; r++) {
    float* row = m + r * MULT;
    float top = larger(larger(row[0], row[1]), larger(row[2], row[3]));
#pragma unroll
    for (int i = 0; i < MULT; i++) row[i] = exp_precise(row[i] - top);
    float factor = div_rn(1.0f, (row[0] + row[1]) + (row[2] + row[3]));
#pragma unroll
    for (int i = 0; i < MULT; i++) row[i] = fma_rn(row[i], factor, eps);
  }
#pragma unroll 1
  for (int n = 0; n < iters; n++) {
    if (n) {
#pragma unroll
      for (int r = 0; r < MULT; r++) {
        float* row = m + r * MULT;
        float factor = reciprocal(((row[0] + row[1]) + (row[2] + row[3])) + eps);
#pragma unroll
        for (int i = 0; i < MULT; i++) row[i] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < MULT; i++) {
      float factor = reciprocal(((m[i] + m[4 + i]) + (m[8 + i] + m[12 + i])) + eps);
#pragma unroll
      for (int r = 0; r < MULT; r++) m[r * MULT + i] *= factor;
    }
  }
}

// The ninth warp: gates of the sublayer's output, and the matrix that mixes the streams after it.
DEVICE void write_gates(const StreamsArgs& p, int row, float logit, float base, float post_scale, float mix_scale) {
  int lane = threadIdx.x & 31;
  if (lane >= MULT && lane < 2 * MULT)
    p.next_post[uint64_t(row) * MULT + lane - MULT] = 2.0f * sigmoid(fma_rn(logit, post_scale, base));
  float cell = 0.0f;
  if (lane >= 2 * MULT && lane < MAX_OUTS) cell = fma_rn(logit, mix_scale, base);
  float m[MULT * MULT];
#pragma unroll
  for (int i = 0; i < MULT * MULT; i++) m[i] = bits_float(shuffle(float_bits(cell), 2 * MULT + i));
  if (lane == 0) {
    balance(m, p.hc_eps, p.iters);
    float* to = p.next_mix + uint64_t(row) * MULT * MULT;
#pragma unroll
    for (int i = 0; i < MULT * MULT; i++) to[i] = m[i];
  }
}

// Eight channels as e4m3, even words of a group before odd ones, with a scale over sixteen threads' channels.
DEVICE void write_codes(const StreamsArgs& p, int row, int channel, const uint32_t* pairs) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    amax = larger(amax, bits_float(float_bits(low(pairs[i])) & 0x7FFFFFFFu));
    amax = larger(amax, bits_float(float_bits(high(pairs[i])) & 0x7FFFFFFFu));
  }
#pragma unroll
  for (int step = 8; step; step /= 2) amax = larger(amax, shuffle_xor(amax, step));
  int e = activation_exponent(amax);
  float inverse = power_of_two(-e);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    words[i] = to_e4m3x2(low(pairs[2 * i]) * inverse, high(pairs[2 * i]) * inverse) |
               to_e4m3x2(low(pairs[2 * i + 1]) * inverse, high(pairs[2 * i + 1]) * inverse) << 16;
  float scale = power_of_two(e);
  if (channel >= p.dim) return;
  // The even words of 32 columns, then the odd ones, see layout.to_mma_order.
  uint8_t* group = p.codes + uint64_t(row) * p.dim + (channel & ~31);
  uint32_t* to = reinterpret_cast<uint32_t*>(group + ((channel >> 3) & 3) * 4);
  to[0] = words[0], to[4] = words[1];
  if ((channel & 127) == 0) p.code_scale[uint64_t(row) * (p.dim / BLOCK) + channel / BLOCK] = scale;
}
