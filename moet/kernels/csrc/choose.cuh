// Who is chosen, in one launch: the router's scores, the best experts of up to eight tokens, and the
// list of work for the kernels that follow. The CTA that arrives last does what needs all scores.
#pragma once
#include "grid_sync.cuh"
#include "stream_gemm.cuh"

constexpr int MAX_TOKENS = 8;

// An expert that some token chose. The choice of token t (or NOT_CHOSEN) is byte t of `choices`.
struct alignas(16) Chosen {
  int slot;            // in the pool of its source; negative: not resident
  uint32_t expert;     // the source in bits 31:16
  uint32_t choices[2];
};

struct ChooseArgs {
  const uint16_t* x;        // [tokens, k] bf16, for the router; null: expert_ids and weights are given
  const uint16_t* weight;   // [experts, k] bf16 in plane order
  const float* bias;        // [experts], chooses and does not weigh; or null
  const int64_t* table;     // [vocabulary, top_k] experts of each token id, or null
  const int64_t* token_ids;
  const int64_t* positions; // below 0: the token has no expert; or null
  const int64_t* slot_of[2];  // [experts] of each source, -1 where not resident; the second first, or null
  int64_t* expert_ids;      // [tokens, top_k]
  float* weights;
  Chosen* chosen;
  uint32_t* num_chosen;
  uint32_t* counters;       // of the launch that follows
  float* partial;           // [slices, tokens, experts]
  uint32_t* arrived;        // zero between launches
  uint32_t* error;
  Entry* entries;           // the same list as stream_gemm.cuh reads it, of [pairs], or null
  int* num_entries;
  int* places;              // [pairs]
  int tokens, k, chunks, experts, top_k, tiles, slices, slice_stages, first_half_stages, num_counters;
  int ctas;                 // of the launch that choose: the first ones
  uint32_t slices_inverse, experts_inverse, top_k_inverse;  // see divide
  int sigmoid;
  float scaling_factor;
};

constexpr int MAX_ROUTED = 512;
constexpr int PER_THREAD = MAX_ROUTED / THREADS + 1;  // experts, with the one for ids that are none
constexpr int OF_SECOND = 1 << 30;                    // a slot of the second source

struct Choose {
  const ChooseArgs& p;
  int tid, lane, warp;
  float* score;   // [tokens][experts]
  uint32_t* key;  // in the order of score + bias; 0 is less than all
  uint8_t* choice_of;  // [experts + 1][MAX_TOKENS]: which choice of each token; 255 for none
  int* id;             // [pairs]: expert, `experts` for one that is none, -1 for no choice
  int* slots;          // [experts]
  int* first_place;    // [experts + 1]
  uint32_t* totals;    // [warps]
  static constexpr int OWN = MAX_ROUTED / THREADS;
  int64_t first_slots[OWN], second_slots[OWN];  // of this thread's experts
  float own_bias;      // of expert tid
  int64_t own_position, own_id;  // of this warp's token
  DEVICE Choose(const ChooseArgs& args) : p(args) {
    tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    score = reinterpret_cast<float*>(dynamic_shared());
    key = reinterpret_cast<uint32_t*>(score + MAX_TOKENS * p.experts);
    choice_of = reinterpret_cast<uint8_t*>(key + MAX_TOKENS * p.experts);
    id = reinterpret_cast<int*>(choice_of + MAX_TOKENS * (p.experts + 1));
    slots = id + MAX_TOKENS * 32;
    first_place = slots + p.experts;
    totals = reinterpret_cast<uint32_t*>(first_place + p.experts + 1);
  }

  DEVICE void run() {
    uint4 ahead[8];
    if (p.x) load_stage(first_stage(), ahead);  // weights do not wait for x
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && p.num_counters > 0) {  // a fence takes its time, and all wait for this CTA
      for (int i = tid; i < p.num_counters; i += THREADS) p.counters[i] = 0;
      fence_device();
    }
    sync_threads();
    let_next_kernel_start();  // it finds the counters zero
    ask();
    if (p.x) {
      logits(ahead);
      if (!last_to_arrive()) return;
      read_slots();
      scores();
      sync_threads();
      if (warp < p.tokens) {
        if (p.experts <= MAX_ROUTED / 2) choose<MAX_ROUTED / 64>();
        else choose<MAX_ROUTED / 32>();
      }
      sync_threads();
    } else {
      read_slots();
      for (int i = tid; i < p.tokens * p.top_k; i += THREADS) id[i] = checked(p.expert_ids[i]);
      sync_threads();
    }
    list();
  }
  // For what the last CTA to arrive would otherwise ask for only then.
  DEVICE void ask() {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      int e = tid + j * THREADS;
      bool there = e < p.experts;
      first_slots[j] = there ? p.slot_of[0][e] : -1;
      second_slots[j] = there && p.slot_of[1] ? p.slot_of[1][e] : -1;
    }
    own_bias = p.bias && tid < p.experts ? p.bias[tid] : 0.0f;
    own_position = p.positions && warp < p.tokens ? p.positions[warp] : 0;
    own_id = p.table && warp < p.tokens ? p.token_ids[warp] : 0;
  }
  DEVICE void read_slots() {
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      int e = tid + j * THREADS;
      if (e >= p.experts) break;
      slots[e] = static_cast<int>(second_slots[j] >= 0 ? second_slots[j] | OF_SECOND : first_slots[j]);
    }
  }
  // What chooses beside score i of [tokens, experts].
  DEVICE float bias_of(int i) const {
    if (!p.bias) return 0.0f;
    if (p.experts == THREADS) return own_bias;
    return p.bias[i - divide(i, p.experts_inverse) * p.experts];
  }
  DEVICE int checked(int64_t e) const {
    return e >= 0 && e < p.experts ? static_cast<int>(e) : e == -1 ? -1 : p.experts;
  }

  // 64 experts by one slice of the columns, for all tokens: the order of stream_gemm.cuh for bf16.
  DEVICE int first_stage() const { return shuffle(tid >> 7, 0) ? p.first_half_stages : 0; }
  DEVICE void load_stage(int s, uint4* words) const {
    int tile = divide(blockIdx.x, p.slices_inverse), slice = blockIdx.x - tile * p.slices;
    int chunk = (slice * p.slice_stages + s) * 2, w = shuffle(tid >> 5, 0) & 3;
    const uint4* from = reinterpret_cast<const uint4*>(p.weight) + (uint64_t(tile * 4 + w) * p.chunks + chunk) * 128 + lane;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      words[i] = {0, 0, 0, 0};
      if (s < p.slice_stages && chunk + i / 4 < p.chunks) words[i] = load_streaming(from + i * 32);
    }
  }
  DEVICE void logits(uint4* ahead) {
    uint8_t* activations = dynamic_shared();
    float* reduction = reinterpret_cast<float*>(activations + p.slice_stages * 2048);
    int tile = divide(blockIdx.x, p.slices_inverse), slice = blockIdx.x - tile * p.slices;
    int group = shuffle(tid >> 7, 0);
    int first_chunk = slice * p.slice_stages * 2, w = shuffle(tid >> 5, 0) & 3;
#pragma unroll 1
    for (int i = tid; i < p.slice_stages * 8 * MAX_TOKENS; i += THREADS) {
      int token = i & 7, block = i >> 3, column = first_chunk * 64 + block * 16;
      uint4 u = {0, 0, 0, 0}, v = u;
      if (token < p.tokens && column < p.k) {
        const uint4* x = reinterpret_cast<const uint4*>(p.x + token * p.k + column);
        u = load_fresh(x), v = load_fresh(x + 1);
      }
      uint8_t* to = activations + block * 256 + token * 16;
      *reinterpret_cast<uint4*>(to) = {u.x, u.z, v.x, v.z};
      *reinterpret_cast<uint4*>(to + 128) = {u.y, u.w, v.y, v.w};
    }
    fence_shared_for_matrix_units();
    sync_threads();
    float sum[4] = {0, 0, 0, 0};
    int from_stage = group ? p.first_half_stages : 0, to_stage = group ? p.slice_stages : p.first_half_stages;
#pragma unroll 1
    for (int s = from_stage; s < to_stage; s++) {
      uint32_t a[2][4][4];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        uint4 v = ahead[i];
        a[i / 4][i % 4][0] = v.x, a[i / 4][i % 4][1] = v.y, a[i / 4][i % 4][2] = v.z, a[i / 4][i % 4][3] = v.w;
      }
      if (s + 1 < to_stage) load_stage(s + 1, ahead);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float part[4];
        RowScale none = {0, 0, 0};
        mma_begin();
        chunk_mma<BF16, 1, 0>(part, a[c], b_operand(activations + (2 * s + c) * 1024, 0), none);
        mma_commit();
        mma_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += part[i];
      }
    }
    float* mine = reduction + (tid & 127);
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < 4; i++) mine[i * 128] = sum[i];
    }
    sync_threads();
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = 2 * (lane & 3) + (i & 1), e = tile * 64 + w * 16 + (lane >> 2) + 8 * (i >> 1);
      if (token < p.tokens && e < p.experts)
        p.partial[(slice * p.tokens + token) * p.experts + e] = sum[i] + mine[i * 128];
    }
  }
  DEVICE bool last_to_arrive() {
    sync_threads();  // all stores of this CTA lie behind the thread that counts
    uint32_t* before = reinterpret_cast<uint32_t*>(id);
    if (tid == 0) {
      *before = add_ordered(p.arrived, 1);
      if (*before + 1 == uint32_t(p.ctas)) *p.arrived = 0;
    }
    sync_threads();
    bool last = *before + 1 == uint32_t(p.ctas);
    sync_threads();
    return last;
  }
  // Loads do not depend on sums; what is not there counts as -0, which changes no sum.
  DEVICE void scores() {
    constexpr int AT_ONCE = 16;
    uint32_t plane = p.tokens * p.experts;
#pragma unroll 2
    for (int i = tid; i < p.tokens * p.experts; i += THREADS) {
      float v = 0.0f;
#pragma unroll 1
      for (int first = 0; first < p.slices; first += AT_ONCE) {
        float part[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) part[s] = first + s < p.slices ? load_fresh(p.partial + (first + s) * plane + i) : -0.0f;
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) v = first + s ? v + part[s] : part[s];
      }
      float s = router_score(v, p.sigmoid);
      uint32_t bits = float_bits(s + bias_of(i) + 0.0f);
      score[i] = s;
      key[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
  }
  DEVICE static float router_score(float x, bool sigmoid) {
    if (sigmoid) return div_rn(1.0f, 1.0f + exp_precise(-x));
    return sqrt_rn(log1p_precise(exp_precise(x < 0.0f ? x : -x)) + larger(x, 0.0f));
  }

  // A warp a token: the best by key, of equals the lowest id; weights normalised in the order of choice.
  template <int OF_LANE>
  DEVICE void choose() {
    int token = warp;
    const float* scored = score + token * p.experts;
    bool none = own_position < 0;
    uint32_t mine_key[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) mine_key[i] = lane + 32 * i < p.experts ? key[token * p.experts + lane + 32 * i] : 0;
    const int64_t* given = p.table ? p.table + own_id * p.top_k : nullptr;
    float total = 0.0f, mine = 0.0f;
    int my_id = 0;
    for (int k = 0; k < p.top_k; k++) {
      int e;
      if (given) {
        e = static_cast<int>(given[k]);
      } else {
        uint32_t best = 0, lowest = ~0u;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) best = mine_key[i] > best ? mine_key[i] : best;
        best = warp_max(best);
#pragma unroll
        for (int i = OF_LANE - 1; i >= 0; i--)
          if (mine_key[i] == best) lowest = lane + 32 * i;
        e = static_cast<int>(warp_min(lowest));
#pragma unroll
        for (int i = 0; i < OF_LANE; i++)
          if (lane + 32 * i == e) mine_key[i] = 0;
      }
      float s = e >= 0 && e < p.experts ? scored[e] : 0.0f;
      total = k ? add_rn(total, s) : s;
      if (lane == k) mine = s, my_id = e;
    }
    if (lane < p.top_k) {
      int at = token * p.top_k + lane;
      if (none) my_id = -1;
      p.expert_ids[at] = my_id;
      p.weights[at] = none ? 0.0f : div_rn(mine, total == 0.0f ? 1.0f : total) * p.scaling_factor;
      id[at] = none ? -1 : my_id >= 0 && my_id < p.experts ? my_id : p.experts;
    }
  }

  // The chosen experts in the order of their ids, each with its tokens. A thread has some experts in
  // a row; what those before it take is a prefix sum.
  DEVICE void list() {
    int pairs = p.tokens * p.top_k;
    for (int i = tid; i < (p.experts + 1) * 2; i += THREADS) reinterpret_cast<uint32_t*>(choice_of)[i] = ~0u;
    sync_threads();
    int e = tid < pairs ? id[tid] : -1, token = divide(tid, p.top_k_inverse), k = tid - token * p.top_k;
    if (e >= 0) choice_of[e * MAX_TOKENS + token] = static_cast<uint8_t>(k);
    sync_threads();
    if (e >= 0 && choice_of[e * MAX_TOKENS + token] != k) atomic_or(p.error, INVALID_COUNT);  // twice in a row
    const uint64_t* choices = reinterpret_cast<const uint64_t*>(choice_of);
    uint32_t mine = 0;  // places in bits 15:0, experts above
    for (int j = 0; j < PER_THREAD; j++) mine += room_of(choices, tid * PER_THREAD + j);
    uint32_t sum = mine;
    for (int step = 1; step < 32; step *= 2) {
      uint32_t other = shuffle(sum, lane - step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    sync_threads();
    uint32_t before = sum - mine;
    for (int w = 0; w < warp; w++) before += totals[w];
    for (int j = 0; j < PER_THREAD; j++) {
      int expert = tid * PER_THREAD + j;
      uint32_t room = room_of(choices, expert);
      if (room) store_entry(before >> 16, expert, before & 0xFFFF, room & 0xFFFF, choices[expert]);
      before += room;
    }
    if (tid == THREADS - 1) {
      *p.num_chosen = before >> 16;
      if (p.num_entries) *p.num_entries = before >> 16;
    }
    sync_threads();
    if (e < 0 || !p.places) return;
    uint64_t earlier = (uint64_t(1) << (8 * token)) - 1;
    p.places[first_place[e] + MAX_TOKENS - absent(choices[e] | ~earlier)] = tid;
  }
  // Of eight choices.
  DEVICE static int absent(uint64_t choices) {
    return static_cast<int>((choices >> 7 & 0x0101010101010101u) * 0x0101010101010101u >> 56);
  }
  DEVICE uint32_t room_of(const uint64_t* choices, int expert) const {
    int count = expert <= p.experts ? MAX_TOKENS - absent(choices[expert]) : 0;
    return count | (count > 0) << 16;
  }
  DEVICE void store_entry(int at, int expert, int place, int count, uint64_t choices) {
    first_place[expert] = place;
    bool known = expert < p.experts;
    int slot = known ? slots[expert] : -1;
    bool second = slot >= 0 && (slot & OF_SECOND);
    if (second) slot &= ~OF_SECOND;
    uint32_t number = known ? expert : 0;
    p.chosen[at] = {slot, number | uint32_t(second) << 16, {static_cast<uint32_t>(choices), static_cast<uint32_t>(choices >> 32)}};
    if (p.entries) p.entries[at] = {slot, static_cast<int>(number), place, count};
  }
};
