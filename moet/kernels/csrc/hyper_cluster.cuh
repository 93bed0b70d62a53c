// A row by a cluster, whose CTAs have two blocks each and read each other's sums where run_step has them
// in device memory; all sums in its order. Grid: CLUSTER_CTAS a row.
#pragma once
#include "cluster.cuh"
#include "hyper_step.cuh"

constexpr int CLUSTER_CTAS = 16, CLUSTER_DIM = 2 * CLUSTER_CTAS * BLOCK;
struct ClusterShared {
  float parts[2][PARTS];        // of each block
  float gathered[8][PARTS];
  float squares[CLUSTER_CTAS], sums[8];
  uint2 mixed[2][MULT][32];     // four channels of a lane
};
#ifdef MOET_EMULATE
#define CLUSTERS(name)                                                                                   \
  extern "C" int emulate_##name(const StreamsArgs* args, int grid_x, int, int shared_bytes) {            \
    return emulation::run_clusters(grid_x, CLUSTER_CTAS, STEP_THREADS, shared_bytes, [=] { name(*args); }); \
  }
DEVICE void arrive_in_cluster() {}
DEVICE void wait_for_cluster() { emulation::meet_cluster(); }
#else
#define CLUSTERS(name)
DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
#endif

template <bool MIXED>
DEVICE void run_cluster(const StreamsArgs& p) {
  ClusterShared& s = *reinterpret_cast<ClusterShared*>(dynamic_shared());
  int warp = shuffle(threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  int row = blockIdx.x / CLUSTER_CTAS, rank = blockIdx.x % CLUSTER_CTAS;
  bool finishes = warp == 0 && lane < 16, passes = MIXED || p.y;
  int thread = rank * 16 + (lane & 15);  // of those that finish a row in finish_row
  uint4 fn[2][3][MULT];
#pragma unroll
  for (int b = 0; b < 2; b++)
#pragma unroll
    for (int g = 0; g < 3; g++)
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        int out = g * 8 + warp;
        fn[b][g][k] = {0, 0, 0, 0};
        if (warp < 8 && out < p.outs)
          fn[b][g][k] = *reinterpret_cast<const uint4*>(p.fn + (uint64_t(out) * MULT + k) * p.dim + (b * CLUSTER_CTAS + rank) * BLOCK + lane * 4);
      }
  float base = lane < p.outs ? p.base[lane] : 0.0f, scale[3] = {p.scale[0], 0.0f, 0.0f};
  if (p.next_post) scale[1] = p.scale[1], scale[2] = p.scale[2];
  uint4 weight[2][2] = {};
  if (finishes) {
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const uint4* from = reinterpret_cast<const uint4*>(p.weight + (g * 256 + thread) * 8);
      weight[g][0] = from[0], weight[g][1] = from[1];
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp < 8) {
    uint2 old[2][MULT], y[2] = {};
    float post[MULT] = {}, mix[MULT * MULT] = {};
#pragma unroll
    for (int b = 0; b < 2; b++) {
      int channel = (b * CLUSTER_CTAS + rank) * BLOCK + lane * 4;
#pragma unroll
      for (int k = 0; k < MULT; k++)
        old[b][k] = *reinterpret_cast<const uint2*>(p.streams + (uint64_t(row) * MULT + k) * p.dim + channel);
      if constexpr (MIXED)
        y[b] = sum_of_parts(p, row, channel);
      else if (passes)
        y[b] = *reinterpret_cast<const uint2*>(p.y + uint64_t(row) * p.dim + channel);
    }
    if (passes) {
#pragma unroll
      for (int k = 0; k < MULT; k++) post[k] = p.post[uint64_t(row) * MULT + k];
#pragma unroll
      for (int k = 0; k < MULT * MULT; k++) mix[k] = p.mix[uint64_t(row) * MULT * MULT + k];
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
      int channel = (b * CLUSTER_CTAS + rank) * BLOCK + lane * 4;
      float sum[3] = {}, square = 0.0f;
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        uint2 stream = passes ? mix_four(old[b], y[b], post[k], mix + k) : old[b][k];
        if (warp == 0) {
          s.mixed[b][k][lane] = stream;
          if (passes) *reinterpret_cast<uint2*>(p.mixed + (uint64_t(row) * MULT + k) * p.dim + channel) = stream;
        }
        Four v = unpack_four(stream);
#pragma unroll
        for (int i = 0; i < 4; i++) square = fma_rn(v.v[i], v.v[i], square);
#pragma unroll
        for (int g = 0; g < 3; g++) {
          uint32_t w[4] = {fn[b][g][k].x, fn[b][g][k].y, fn[b][g][k].z, fn[b][g][k].w};
#pragma unroll
          for (int i = 0; i < 4; i++) sum[g] = fma_rn(bits_float(w[i]), v.v[i], sum[g]);
        }
      }
#pragma unroll
      for (int g = 0; g < 3; g++) {
        sum[g] = warp_sum(sum[g]);
        if (lane == 0) s.parts[b][g * 8 + warp] = sum[g];
      }
      if (warp == 0) {
        square = warp_sum(square);
        if (lane == 0) s.parts[b][PARTS - 1] = square;
      }
    }
  }
  arrive_in_cluster();
  wait_for_cluster();
  if (warp < 8) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int block = i * 8 + warp;
      sum = add_rn(sum, load_of_rank(&s.parts[block / CLUSTER_CTAS][lane], block % CLUSTER_CTAS));
    }
    s.gathered[warp][lane] = sum;
  }
  sync_threads();
  float total = s.gathered[0][lane];
#pragma unroll
  for (int w = 1; w < 8; w++) total = add_rn(total, s.gathered[w][lane]);
  float logit = mixing_logit(p, total);
  uint32_t x[2][4] = {};
  if (warp == 0) {
    float gate = lane < MULT ? sigmoid(fma_rn(logit, scale[0], base)) + p.hc_eps : 0.0f;
    float pre[MULT], squares = 0.0f;
#pragma unroll
    for (int k = 0; k < MULT; k++) pre[k] = bits_float(shuffle(float_bits(gate), k));
#pragma unroll
    for (int g = 0; g < 2; g++) {
      uint2 raw[MULT][2];
#pragma unroll
      for (int k = 0; k < MULT; k++) raw[k][0] = s.mixed[g][k][2 * (lane & 15)], raw[k][1] = s.mixed[g][k][2 * (lane & 15) + 1];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lo = 0.0f, hi = 0.0f;
#pragma unroll
        for (int k = 0; k < MULT; k++) {
          uint32_t pair = i == 0 ? raw[k][0].x : i == 1 ? raw[k][0].y : i == 2 ? raw[k][1].x : raw[k][1].y;
          lo = fma_rn(low(pair), pre[k], lo);
          hi = fma_rn(high(pair), pre[k], hi);
        }
        x[g][i] = packed(lo, hi);
        squares = fma_rn(low(x[g][i]), low(x[g][i]), squares);
        squares = fma_rn(high(x[g][i]), high(x[g][i]), squares);
      }
    }
    if (lane < 16) s.squares[lane] = squares;
  }
  arrive_in_cluster();
  if (warp == 8 && rank == 0 && p.next_post) write_gates(p, row, logit, base, scale[1], scale[2]);
  wait_for_cluster();
  if (warp < 8) {
    float squares = warp_sum(load_of_rank(&s.squares[lane & 15], 2 * warp + (lane >> 4)));
    if (lane == 0) s.sums[warp] = squares;
    sync_named<256>(1);
  }
  if (warp == 0) {
    float mean = s.sums[0];
#pragma unroll
    for (int w = 1; w < 8; w++) mean = add_rn(mean, s.sums[w]);
    float factor = div_rn(1.0f, sqrt_rn(mean / static_cast<float>(p.dim) + p.norm_eps));
#pragma unroll
    for (int g = 0; g < 2; g++) {
      int channel = finishes ? (g * 256 + thread) * 8 : p.dim;
      uint32_t w[8] = {weight[g][0].x, weight[g][0].y, weight[g][0].z, weight[g][0].w, weight[g][1].x, weight[g][1].y, weight[g][1].z, weight[g][1].w};
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        out[i] = packed(low(x[g][i]) * factor * bits_float(w[2 * i]), high(x[g][i]) * factor * bits_float(w[2 * i + 1]));
      if (finishes) *reinterpret_cast<uint4*>(p.x + uint64_t(row) * p.dim + channel) = {out[0], out[1], out[2], out[3]};
      if (p.codes) write_codes(p, row, channel, out);
    }
  }
  arrive_in_cluster();
  wait_for_cluster();  // until here others may read
}
