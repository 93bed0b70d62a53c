// What a sublayer made joins the residual stream; the norm of that, rounded to e4m3, is the next one's input.
// See join_norm.py.
//
// A group is 128 columns, four to a lane of a warp. Its squares are summed by one lane order and tree,
// the groups' sums by another: a row's bits do not depend on how many CTAs have a part of it.
#include "cluster.cuh"
#include "codec.cuh"
#include "peers.cuh"

constexpr int JOIN_THREADS = 256;
constexpr int WARPS = JOIN_THREADS / 32;
constexpr int GROUP = 128, MAX_GROUPS = 64;
constexpr int MAX_PARTS = 8;  // of a mixture's row

struct JoinArgs {
  const uint16_t* x;           // [rows, dim] bf16, the stream
  const uint16_t* y;           // [rows, dim] bf16, what joins; null: nothing, or a mixture
  const uint16_t* parts;       // [rows * top_k, dim]: y is their sum, weighed, in order, and `shared`, rounded
  const float* part_weights;   // [rows * top_k], or null
  const uint16_t* shared;      // [rows, dim]
  const int64_t* expert_ids;   // [rows, top_k]; a first one below 0: the row has no parts
  const float* weight;         // [dim]
  uint16_t* total;             // [rows, dim]; null: nothing joins
  uint16_t* values;            // [rows, dim]
  uint8_t* codes;              // [rows, dim] e4m3 in MMA order; or null
  float* scales;               // [rows, dim / 128]
  PeerArgs peers;              // y is this rank's part of a sum, unless ranks is 0. turns: [rows * slices]
  float eps;
  int dim, top_k;
  int slices;                  // CTAs of a row, a cluster
};

DEVICE float low(uint32_t pair) { return bits_float(pair << 16); }
DEVICE float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }
DEVICE float tree_of_warp(float v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v = add_rn(v, shuffle_xor(v, step));
  return v;
}

struct Four {
  float v[4];
};
DEVICE Four unpack(uint2 u) { return {{low(u.x), high(u.x), low(u.y), high(u.y)}}; }
DEVICE uint2 pack(const Four& f) { return {bf16s(f.v[0], f.v[1]), bf16s(f.v[2], f.v[3])}; }
DEVICE uint2 load_pairs(const uint16_t* p) { return *reinterpret_cast<const uint2*>(p); }

// Four columns of a mixture, as combine_experts of moe.cu sums it. All parts are read before any is added.
DEVICE uint2 sum_of_parts(const JoinArgs& p, int row, int column) {
  int first = row * p.top_k;
  uint2 part[MAX_PARTS];
  float weight[MAX_PARTS];
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    int choice = first + (k < p.top_k ? k : 0);
    part[k] = load_pairs(p.parts + static_cast<int64_t>(choice) * p.dim + column);
    weight[k] = p.part_weights ? p.part_weights[choice] : 1.0f;
  }
  Four own = unpack(load_pairs(p.shared + static_cast<int64_t>(row) * p.dim + column));
  int choices = p.expert_ids[first] < 0 ? 0 : p.top_k;
  Four sum = {};
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    Four v = unpack(part[k]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float term = v.v[i] * weight[k], more = k ? add_rn(sum.v[i], term) : term;
      sum.v[i] = k < choices ? more : sum.v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sum.v[i] = add_rn(sum.v[i], own.v[i]);
  return pack(sum);
}

DEVICE Four add_pairs(Pair a, Pair b) {
  Four x = unpack({a.low, a.high}), y = unpack({b.low, b.high});
#pragma unroll
  for (int i = 0; i < 4; i++) x.v[i] = add_rn(x.v[i], y.v[i]);
  return x;
}
// Four columns of every rank's y, as tree_of_bf16 adds them: each rank begins with its own pair of ranks.
template <int RANKS>
DEVICE uint2 sum_of_ranks(const PeerArgs& p, uint32_t turn, int i, uint2 y) {
  Pair own = {y.x, y.y}, near = own, far = own, last = own;
#pragma unroll
  for (int step = 1; step < RANKS; step++)
    push(place_of(p, p.rank ^ step, p.rank, turn) + i, {own.low, turn, own.high, turn});
  take(p, p.rank ^ 1, turn, i, near);
  Four sum = add_pairs(own, near);
  if (RANKS == 4) {
    take(p, p.rank ^ 2, turn, i, far);
    take(p, p.rank ^ 3, turn, i, last);
    Four more = add_pairs(far, last);
#pragma unroll
    for (int j = 0; j < 4; j++) sum.v[j] = add_rn(sum.v[j], more.v[j]);
  }
  return pack(sum);
}

// Norm and codes of four columns, all lanes of a group at once. factor: one over the root mean square.
DEVICE void write_group(const JoinArgs& p, int64_t row, int group, uint2 stream, uint4 weight, float factor) {
  int lane = threadIdx.x & 31;
  Four f = unpack(stream);
  uint32_t w[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int i = 0; i < 4; i++) f.v[i] = f.v[i] * factor * bits_float(w[i]);
  uint2 out = pack(f);
  int64_t at = row * p.dim + group * GROUP;
  *reinterpret_cast<uint2*>(p.values + at + lane * 4) = out;
  if (!p.codes) return;
  f = unpack(out);
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t size = float_bits(f.v[i]) & 0x7FFFFFFFu;
    amax = size > amax ? size : amax;
  }
  int e = activation_exponent(bits_float(warp_max(amax)));
  float inverse = power_of_two(-e);
  uint32_t word = to_e4m3x2(f.v[0] * inverse, f.v[1] * inverse) | to_e4m3x2(f.v[2] * inverse, f.v[3] * inverse) << 16;
  int place = (lane & 24) | (lane & 1) << 2 | (lane & 7) >> 1;  // layout.to_mma_order, in words
  reinterpret_cast<uint32_t*>(p.codes + at)[place] = word;
  if (lane == 0) p.scales[row * (p.dim / GROUP) + group] = power_of_two(e);
}

// GROUPS: of a warp. CLUSTERS: p.slices CTAs have a row, and no cluster is launched where that is one; otherwise
// one. MIXED: y is summed from parts. RANKS: that have parts of y.
template <int GROUPS, bool CLUSTERS, bool MIXED, int RANKS>
DEVICE void join(const JoinArgs& p) {
  let_next_kernel_start();
  uint64_t* barrier = reinterpret_cast<uint64_t*>(dynamic_shared());  // every group's sum is here
  float* sums = reinterpret_cast<float*>(barrier + 2);
  int slice = CLUSTERS ? blockIdx.x % p.slices : 0, slices = CLUSTERS ? p.slices : 1;
  int row = CLUSTERS ? blockIdx.x / p.slices : blockIdx.x;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, groups = p.dim / GROUP;
  bool shared = CLUSTERS && slices > 1;  // instructions of clusters are illegal outside of one
  if (shared) {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_arrive_expecting(barrier, groups * 4);
    }
    arrive_at_slices();
  }
  uint4 weight[GROUPS];
  uint2 stream[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int group = (g * slices + slice) * WARPS + warp;
    if (group < groups) weight[g] = *reinterpret_cast<const uint4*>(p.weight + group * GROUP + lane * 4);
  }
  if (shared) wait_for_slices();
  wait_for_previous_kernel();
  uint32_t turn = RANKS ? p.peers.turns[blockIdx.x] + 1 : 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int group = (g * slices + slice) * WARPS + warp;
    if (group >= groups) continue;
    int column = group * GROUP + lane * 4;
    int64_t at = static_cast<int64_t>(row) * p.dim + column;
    stream[g] = load_pairs(p.x + at);
    if (MIXED || p.y) {
      uint2 y = MIXED ? sum_of_parts(p, row, column) : load_pairs(p.y + at);
      if (RANKS > 1) y = sum_of_ranks<RANKS>(p.peers, turn, static_cast<int>(at / 4), y);
      stream[g] = pack(add_pairs({stream[g].x, stream[g].y}, {y.x, y.y}));
    }
    Four f = unpack(stream[g]);
    float square = f.v[0] * f.v[0];
#pragma unroll
    for (int i = 1; i < 4; i++) square = fma_rn(f.v[i], f.v[i], square);
    square = tree_of_warp(square);
    if (!shared && lane == 0) sums[group] = square;
    if (shared && lane < slices) send_to_rank(sums + group, barrier, lane, square);
    if (MIXED || p.y) *reinterpret_cast<uint2*>(p.total + at) = stream[g];
  }
  if (shared) barrier_wait(barrier, 0);
  if (!shared || RANKS) sync_threads();
  if (RANKS && threadIdx.x == 0) p.peers.turns[blockIdx.x] = turn;  // which all have read
  float total = add_rn(lane < groups ? sums[lane] : 0.0f, lane + 32 < groups ? sums[lane + 32] : 0.0f);
  total = tree_of_warp(total);
  float factor = div_rn(1.0f, sqrt_rn(total / static_cast<float>(p.dim) + p.eps));
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    int group = (g * slices + slice) * WARPS + warp;
    if (group < groups) write_group(p, row, group, stream[g], weight[g], factor);
  }
}

// A row to a cluster of p.slices CTAs, whose warps have a group each; at most MAX_GROUPS.
KERNEL(JOIN_THREADS, 2) join_norm(GRID_CONSTANT JoinArgs p) { join<1, true, false, 0>(p); }
CLUSTERED(join_norm, JoinArgs, JOIN_THREADS)
KERNEL(JOIN_THREADS, 2) join_norm_ranks_2(GRID_CONSTANT JoinArgs p) { join<1, true, false, 2>(p); }
CLUSTERED(join_norm_ranks_2, JoinArgs, JOIN_THREADS)
KERNEL(JOIN_THREADS, 2) join_norm_ranks_4(GRID_CONSTANT JoinArgs p) { join<1, true, false, 4>(p); }
CLUSTERED(join_norm_ranks_4, JoinArgs, JOIN_THREADS)
KERNEL(JOIN_THREADS, 2) join_norm_mixed(GRID_CONSTANT JoinArgs p) { join<1, true, true, 0>(p); }
CLUSTERED(join_norm_mixed, JoinArgs, JOIN_THREADS)
KERNEL(JOIN_THREADS, 2) join_norm_mixed_ranks_2(GRID_CONSTANT JoinArgs p) { join<1, true, true, 2>(p); }
CLUSTERED(join_norm_mixed_ranks_2, JoinArgs, JOIN_THREADS)
KERNEL(JOIN_THREADS, 2) join_norm_mixed_ranks_4(GRID_CONSTANT JoinArgs p) { join<1, true, true, 4>(p); }
CLUSTERED(join_norm_mixed_ranks_4, JoinArgs, JOIN_THREADS)

// A row to a CTA.
KERNEL(JOIN_THREADS, 2) join_norm_many(GRID_CONSTANT JoinArgs p) { join<MAX_GROUPS / WARPS, false, false, 0>(p); }
LAUNCHABLE(join_norm_many, JoinArgs, JOIN_THREADS)
