// Around the expert GEMMs of a decode step: activations to e4m3, the device work list, the sum.
#include "stream_gemm.cuh"

struct QuantiseArgs {
  const uint16_t* x;  // [rows, k] bf16, k % 32 == 0
  uint8_t* q;         // [rows, k] e4m3 in MMA order
  float* scale;       // [rows, groups]
  int rows, k, ld_x, groups;
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
      if ((block & 3) == 0) p.scale[uint64_t(row) * p.groups + block / 4] = power_of_two(e);
    }
  }
}
LAUNCHABLE(quantise_rows, QuantiseArgs, 256)

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

struct CombineArgs {
  const uint16_t* parts;      // [tokens * top_k, dim] bf16
  const float* weights;       // [tokens * top_k], or null
  const uint16_t* shared;     // [tokens, dim] bf16 added last, or null
  void* out;                  // [tokens, dim]
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
    for (int k = 0; k < p.top_k; k++) {
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
