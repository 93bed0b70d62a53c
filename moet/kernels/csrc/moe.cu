// Around the expert GEMMs of a decode step: activations to e4m3, the device work list, the sum.
#include "stream_gemm.cuh"

struct QuantiseArgs {
  const uint16_t* x;  // [rows, k] bf16, k % 32 == 0
  uint8_t* q;         // [rows, k] e4m3 in MMA order
  float* scale;
  int rows, k, ld_x, groups, scale_row_stride, scale_group_stride;
};

// Four lanes take 128 columns of a row.
KERNEL(256, 4) quantise_rows(GRID_CONSTANT QuantiseArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int blocks = p.groups * 4, total = p.rows * blocks;
  int rounded = (total + 31) / 32 * 32;  // whole warps reach the shuffles
  for (int i = blockIdx.x * 256 + threadIdx.x; i < rounded; i += gridDim.x * 256) {
    int row = i / blocks, block = i - row * blocks;
    bool valid = i < total && block * 32 < p.k;
    uint32_t words[16];
    load_bf16x32(p.x + uint64_t(valid ? row : 0) * p.ld_x + block * 32, valid, words);
    float amax = largest_of(words);
    amax = larger(amax, shuffle_xor(amax, 1));
    amax = larger(amax, shuffle_xor(amax, 2));
    int e = activation_exponent(amax);
    uint4 a, b;
    quantise_words(words, power_of_two(-e), a, b);
    if (valid) {
      uint4* to = reinterpret_cast<uint4*>(p.q + uint64_t(row) * p.k + block * 32);
      to[0] = a, to[1] = b;
      if ((block & 3) == 0) p.scale[uint64_t(row) * p.scale_row_stride + uint64_t(block / 4) * p.scale_group_stride] = power_of_two(e);
    }
  }
}
LAUNCHABLE(quantise_rows, QuantiseArgs, 256)

struct TileArgs {
  const uint16_t* x;     // [rows, k] bf16
  uint8_t* tiles;        // [entry, chunk, token group, 16-byte block, token, 16]
  float* scales;         // [entry, chunk, token], for e4m3
  const Entry* entries;  // null: entry e is rows e * tokens ..
  const int* num_entries;
  const int* pairs;
  int num_rows, x_divisor, k, ld_x, chunks, tokens;
};

// A tile's chunk: 128 bytes of each of its tokens, as a shared-memory operand lies. Eight lanes take
// eight tokens, four lanes the 32-byte blocks of a token. FP8: 128 columns with one scale; else 64 bf16.
template <bool FP8>
DEVICE void tile_chunk(const TileArgs& p, int item) {
  int e = item / p.chunks, chunk = item - e * p.chunks;
  Entry t = {0, 0, e * p.tokens, p.num_rows - e * p.tokens};
  if (p.entries) t = p.entries[e];
  int lane = threadIdx.x & 31, block = lane >> 3;
  for (int token = (threadIdx.x >> 5) * 8 + (lane & 7); token < p.tokens; token += 64) {
    int column = chunk * (FP8 ? 128 : 64) + block * (FP8 ? 32 : 16);
    bool valid = token < t.count && column < p.k;
    int row = 0;
    if (valid) row = (p.pairs ? p.pairs[t.first + token] : t.first + token) / p.x_divisor;
    const uint16_t* from = p.x + uint64_t(row) * p.ld_x + (valid ? column : 0);
    uint4 a, b;
    if constexpr (FP8) {
      uint32_t words[16];
      load_bf16x32(from, valid, words);
      float amax = largest_of(words);
      amax = larger(amax, shuffle_xor(amax, 8));
      amax = larger(amax, shuffle_xor(amax, 16));
      int exponent = activation_exponent(amax);
      quantise_words(words, power_of_two(-exponent), a, b);
      if (block == 0) p.scales[uint64_t(item) * p.tokens + token] = power_of_two(exponent);
    } else {
      uint4 u = {0, 0, 0, 0}, v = u;
      if (valid) u = reinterpret_cast<const uint4*>(from)[0], v = reinterpret_cast<const uint4*>(from)[1];
      a = {u.x, u.z, v.x, v.z};
      b = {u.y, u.w, v.y, v.w};
    }
    uint8_t* to = p.tiles + (uint64_t(item) * p.tokens + (token & ~7)) * 128 + block * 256 + (token & 7) * 16;
    *reinterpret_cast<uint4*>(to) = a;
    *reinterpret_cast<uint4*>(to + 128) = b;
  }
}

template <bool FP8>
DEVICE void tile_all(const TileArgs& p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int entries = p.entries ? *p.num_entries : (p.num_rows + p.tokens - 1) / p.tokens;
  for (int i = blockIdx.x; i < entries * p.chunks; i += gridDim.x) tile_chunk<FP8>(p, i);
}
KERNEL(256, 4) tile_rows_fp8(GRID_CONSTANT TileArgs p) { tile_all<true>(p); }
LAUNCHABLE(tile_rows_fp8, TileArgs, 256)
KERNEL(256, 4) tile_rows_bf16(GRID_CONSTANT TileArgs p) { tile_all<false>(p); }
LAUNCHABLE(tile_rows_bf16, TileArgs, 256)

constexpr int PLAN_THREADS = 1024;
constexpr int MAX_EXPERTS = 1023;

struct PlanArgs {
  const int64_t* expert_ids;  // [pairs]
  const int64_t* slot_of;     // [experts]; -1 where an expert is not resident
  Entry* entries;             // room for min(pairs, experts + pairs / rows) + 1
  int* num_entries;
  int* places;                // [pairs]: the pairs in the order of the entries
  uint32_t* error;
  int pairs, experts, rows;   // rows: most of an entry
};

// Inclusive prefix sum over the CTA, in place; both arrays hold PLAN_THREADS values.
DEVICE void prefix_sum(int* values, int* other) {
  int t = threadIdx.x;
  for (int step = 1; step < PLAN_THREADS; step *= 2) {
    other[t] = values[t] + (t >= step ? values[t - step] : 0);
    sync_threads();
    int* swap = values;
    values = other, other = swap;
  }  // an even number of steps: the sums end where they began
}

// One CTA: pairs sorted by expert (stable), cut into entries of at most `rows`. An id out of range
// counts as expert `experts`, which has no slot, so that its rows come out as NaN and an error bit.
KERNEL(PLAN_THREADS, 1) plan_experts(GRID_CONSTANT PlanArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int* counts = reinterpret_cast<int*>(dynamic_shared());
  int* scratch = counts + PLAN_THREADS;
  int* entry_ends = scratch + PLAN_THREADS;
  int* ids = entry_ends + PLAN_THREADS;
  int t = threadIdx.x;
  for (int i = t; i < p.pairs; i += PLAN_THREADS) {
    int64_t id = p.expert_ids[i];
    ids[i] = id >= 0 && id < p.experts ? static_cast<int>(id) : p.experts;
  }
  sync_threads();
  int count = 0;
  if (t <= p.experts)
    for (int i = 0; i < p.pairs; i++) count += ids[i] == t;
  counts[t] = count;
  int mine = (count + p.rows - 1) / p.rows;
  entry_ends[t] = mine;
  sync_threads();
  prefix_sum(counts, scratch);
  prefix_sum(entry_ends, scratch);
  int first_place = counts[t] - count, first_entry = entry_ends[t] - mine;
  if (count > 0) {
    int slot = t < p.experts ? static_cast<int>(p.slot_of[t]) : -1;
    for (int e = 0; e < mine; e++) {
      int left = count - e * p.rows;
      p.entries[first_entry + e] = {slot, slot < 0 ? 0 : t, first_place + e * p.rows, left < p.rows ? left : p.rows};
    }
    int place = first_place;
    for (int i = 0; i < p.pairs; i++)
      if (ids[i] == t) p.places[place++] = i;
  }
  if (t == PLAN_THREADS - 1) *p.num_entries = entry_ends[t];
}
LAUNCHABLE(plan_experts, PlanArgs, PLAN_THREADS)

struct RouteArgs {
  const float* logits;   // [tokens, experts]
  const float* bias;     // [experts], chooses and does not weigh; or null
  const int64_t* table;  // [tokens, top_k] experts that are given, or null
  const int64_t* positions;  // [tokens]; below 0 a token chooses what the first one does. Or null
  int64_t* expert_ids;   // [tokens, top_k]
  float* weights;        // [tokens, top_k]
  int tokens, experts, top_k;
  int sigmoid;           // scores: 1 / (1 + e^-x), else sqrt(log(1 + e^x))
  float scaling_factor;
};

constexpr int SCORES = 16;  // of a lane: experts <= 512

DEVICE float score_of(float x, bool sigmoid) {
  if (sigmoid) return div_rn(1.0f, 1.0f + exp_precise(-x));
  return sqrt_rn(log1p_precise(exp_precise(x < 0.0f ? x : -x)) + larger(x, 0.0f));
}

// A warp a token: the top_k experts by score + bias, of equals the lowest id; then their scores,
// normalised to scaling_factor in the order of choice.
KERNEL(32, 8) route_experts(GRID_CONSTANT RouteArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int lane = threadIdx.x, row = blockIdx.x;
  int token = p.positions && p.positions[row] < 0 ? 0 : row;
  const float* logits = p.logits + uint64_t(token) * p.experts;
  float score[SCORES];
  uint32_t key[SCORES];  // in the order of score + bias; 0 is less than all
#pragma unroll
  for (int i = 0; i < SCORES; i++) {
    int e = lane + 32 * i;
    key[i] = 0, score[i] = 0.0f;
    if (e < p.experts) {
      score[i] = score_of(logits[e], p.sigmoid);
      uint32_t bits = float_bits(score[i] + (p.bias ? p.bias[e] : 0.0f) + 0.0f);
      key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
  }
  float total = 0.0f, mine = 0.0f;
  int my_id = 0;
  for (int k = 0; k < p.top_k; k++) {
    int id;
    if (p.table) {
      id = static_cast<int>(p.table[uint64_t(token) * p.top_k + k]);
    } else {
      uint32_t best = 0, first = ~0u;
#pragma unroll
      for (int i = 0; i < SCORES; i++) best = key[i] > best ? key[i] : best;
      best = warp_max(best);
#pragma unroll
      for (int i = SCORES - 1; i >= 0; i--)
        if (key[i] == best) first = lane + 32 * i;
      id = static_cast<int>(warp_min(first));
    }
    float chosen = 0.0f;
#pragma unroll
    for (int i = 0; i < SCORES; i++)
      if (lane + 32 * i == id) chosen = score[i], key[i] = 0;
    chosen = bits_float(shuffle(float_bits(chosen), id & 31));
    if (id < 0 || id >= p.experts) chosen = 0.0f;
    total = k ? add_rn(total, chosen) : chosen;
    if (lane == k) mine = chosen, my_id = id;
  }
  if (lane < p.top_k) {
    p.expert_ids[uint64_t(row) * p.top_k + lane] = my_id;
    p.weights[uint64_t(row) * p.top_k + lane] = div_rn(mine, total == 0.0f ? 1.0f : total) * p.scaling_factor;
  }
}
LAUNCHABLE(route_experts, RouteArgs, 32)

struct CombineArgs {
  const uint16_t* parts;      // [tokens * top_k, dim] bf16
  const float* weights;       // [tokens * top_k], or null
  const uint16_t* shared;     // [tokens, dim] bf16 added last, or null
  void* out;                  // [tokens, dim]
  const int64_t* expert_ids;  // [tokens, top_k]; a first one below 0: the token has no expert. Or null
  int tokens, top_k, dim, bf16;  // bf16: the dtype of out, else fp32
};

// The sum over a token's choices, in their order, then the shared expert. Two columns a thread.
KERNEL(256, 4) combine_experts(GRID_CONSTANT CombineArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int pairs = p.dim / 2, total = p.tokens * pairs;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
    int token = i / pairs, column = i - token * pairs;
    float lo = 0.0f, hi = 0.0f;
    int choices = p.expert_ids && p.expert_ids[token * p.top_k] < 0 ? 0 : p.top_k;
#pragma unroll 4
    for (int k = 0; k < choices; k++) {
      int row = token * p.top_k + k;
      uint32_t v = reinterpret_cast<const uint32_t*>(p.parts)[uint64_t(row) * pairs + column];
      float w = p.weights ? p.weights[row] : 1.0f;
      float a = bits_float(v << 16) * w, b = bits_float(v & 0xFFFF0000u) * w;
      lo = k ? add_rn(lo, a) : a;
      hi = k ? add_rn(hi, b) : b;
    }
    if (p.shared) {
      uint32_t v = reinterpret_cast<const uint32_t*>(p.shared)[i];
      lo = add_rn(lo, bits_float(v << 16));
      hi = add_rn(hi, bits_float(v & 0xFFFF0000u));
    }
    if (p.bf16)
      static_cast<uint32_t*>(p.out)[i] = to_bf16(lo) | static_cast<uint32_t>(to_bf16(hi)) << 16;
    else
      static_cast<float2*>(p.out)[i] = {lo, hi};
  }
}
LAUNCHABLE(combine_experts, CombineArgs, 256)

// Eight columns times a weight, added to a sum; the first ones are the sum.
DEVICE void add_eight(float* sum, uint4 u, float weight, bool first) {
  uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float lo = bits_float(words[i] << 16) * weight, hi = bits_float(words[i] & 0xFFFF0000u) * weight;
    sum[2 * i] = first ? lo : add_rn(sum[2 * i], lo);
    sum[2 * i + 1] = first ? hi : add_rn(sum[2 * i + 1], hi);
  }
}

// combine_experts for many tokens and a dim of whole eights: as many columns a thread, whose parts are asked
// for eight at once.
constexpr int PARTS_AT_ONCE = 8;
KERNEL(256, 3) combine_many(GRID_CONSTANT CombineArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int eights = p.dim / 8, total = p.tokens * eights;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < total; i += gridDim.x * 256) {
    int token = i / eights, column = (i - token * eights) * 8, first = token * p.top_k;
    uint4 shared = {0, 0, 0, 0};
    if (p.shared) shared = *reinterpret_cast<const uint4*>(p.shared + uint64_t(i) * 8);
    int choices = p.expert_ids && p.expert_ids[first] < 0 ? 0 : p.top_k;
    float sum[8] = {};
#pragma unroll 1
    for (int k = 0; k < choices; k += PARTS_AT_ONCE) {
      uint4 parts[PARTS_AT_ONCE];
      float weights[PARTS_AT_ONCE];
      const uint16_t* from = p.parts + uint64_t(first + k) * p.dim + column;
#pragma unroll
      for (int j = 0; j < PARTS_AT_ONCE; j++, from += p.dim) {
        weights[j] = 1.0f;
        if (k + j >= choices) continue;
        parts[j] = *reinterpret_cast<const uint4*>(from);
        if (p.weights) weights[j] = p.weights[first + k + j];
      }
#pragma unroll
      for (int j = 0; j < PARTS_AT_ONCE; j++)
        if (k + j < choices) add_eight(sum, parts[j], weights[j], k + j == 0);
    }
    if (p.shared) add_eight(sum, shared, 1.0f, false);
    if (p.bf16) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        words[j] = to_bf16(sum[2 * j]) | static_cast<uint32_t>(to_bf16(sum[2 * j + 1])) << 16;
      static_cast<uint4*>(p.out)[i] = {words[0], words[1], words[2], words[3]};
    } else {
      float* to = static_cast<float*>(p.out) + uint64_t(i) * 8;
#pragma unroll
      for (int j = 0; j < 8; j++) to[j] = sum[j];
    }
  }
}
LAUNCHABLE(combine_many, CombineArgs, 256)
