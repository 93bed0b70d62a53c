// Rows whose sums meet in device memory: a grid's CTAs leave them there, and one CTA reads a row's back
// and finishes it.
#pragma once
#include "hyper_streams.cuh"

constexpr int STEP_THREADS = 288;  // eight warps for channels, one for the mixing matrix

// What a thread reads of a site when it finishes a row. HELD: already here.
template <bool HELD>
struct SiteValues {
  float base, scale[3];
  uint4 weight[MAX_GROUPS][2];
};
template <>
struct SiteValues<false> {};

DEVICE SiteValues<true> load_site(const StreamsArgs& p) {
  SiteValues<true> s = {};
  int lane = threadIdx.x & 31;
  if (lane < p.outs) s.base = p.base[lane];
  s.scale[0] = p.scale[0];
  if (p.next_post) s.scale[1] = p.scale[1], s.scale[2] = p.scale[2];
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    int channel = (g * 256 + threadIdx.x) * 8;
    if (threadIdx.x >= 256 || channel >= p.dim) continue;
    const uint4* weight = reinterpret_cast<const uint4*>(p.weight + channel);
    s.weight[g][0] = weight[0], s.weight[g][1] = weight[1];
  }
  return s;
}

// A row's sums over its blocks; every warp of `warps` 0..7 calls, each lane gets its own part.
DEVICE float gather_parts(const StreamsArgs& p, int row, float* shared) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  if (warp < 8) {
    float sum = 0.0f;
    for (int b = warp; b < blocks; b += 8)
      sum = add_rn(sum, load_fresh(p.partial + (uint64_t(row) * blocks + b) * PARTS + lane));
    shared[warp * PARTS + lane] = sum;
  }
  sync_threads();
  float total = shared[lane];
#pragma unroll
  for (int w = 1; w < 8; w++) total = add_rn(total, shared[w * PARTS + lane]);
  return total;
}

// One row from its parts to its outputs, by all threads of a CTA.
template <bool HELD>
DEVICE void finish_row(const StreamsArgs& p, int row, float* shared, const SiteValues<HELD>& site) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint4 raw[MAX_GROUPS][MULT];
  if (warp < 8) {
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + threadIdx.x) * 8;
      if (channel < p.dim) {
#pragma unroll
        for (int k = 0; k < MULT; k++)
          raw[g][k] = load_fresh(reinterpret_cast<const uint4*>(p.mixed + (uint64_t(row) * MULT + k) * p.dim + channel));
      }
    }
  }
  float logit = mixing_logit(p, gather_parts(p, row, shared));
  float base, scale[3];
  if constexpr (HELD) {
    base = site.base, scale[0] = site.scale[0], scale[1] = site.scale[1], scale[2] = site.scale[2];
  } else {
    base = lane < p.outs ? p.base[lane] : 0.0f;
    scale[0] = p.scale[0];
    if (p.next_post) scale[1] = p.scale[1], scale[2] = p.scale[2];
  }
  if (warp == 8) {
    if (p.next_post) write_gates(p, row, logit, base, scale[1], scale[2]);
    return;
  }
  float gate = lane < MULT ? sigmoid(fma_rn(logit, scale[0], base)) + p.hc_eps : 0.0f;
  float pre[MULT];
#pragma unroll
  for (int k = 0; k < MULT; k++) pre[k] = bits_float(shuffle(float_bits(gate), k));
  uint32_t x[MAX_GROUPS][4];
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    if ((g * 256 + threadIdx.x) * 8 < p.dim) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lo = 0.0f, hi = 0.0f;
#pragma unroll
        for (int k = 0; k < MULT; k++) {
          uint32_t pair = i == 0 ? raw[g][k].x : i == 1 ? raw[g][k].y : i == 2 ? raw[g][k].z : raw[g][k].w;
          lo = fma_rn(low(pair), pre[k], lo);
          hi = fma_rn(high(pair), pre[k], hi);
        }
        x[g][i] = packed(lo, hi);
        squares = fma_rn(low(x[g][i]), low(x[g][i]), squares);
        squares = fma_rn(high(x[g][i]), high(x[g][i]), squares);
      }
    }
  }
  squares = warp_sum(squares);
  float* sums = shared + 8 * PARTS;
  if (lane == 0) sums[warp] = squares;
  sync_named<256>(1);
  float mean = sums[0];
#pragma unroll
  for (int w = 1; w < 8; w++) mean = add_rn(mean, sums[w]);
  float factor = div_rn(1.0f, sqrt_rn(mean / static_cast<float>(p.dim) + p.norm_eps));
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    int channel = (g * 256 + threadIdx.x) * 8;
    if (g * 2048 >= p.dim) break;
    uint32_t out[4] = {0, 0, 0, 0};
    if (channel < p.dim) {
      uint4 a, b;
      if constexpr (HELD) {
        a = site.weight[g][0], b = site.weight[g][1];
      } else {
        const uint4* weight = reinterpret_cast<const uint4*>(p.weight + channel);
        a = weight[0], b = weight[1];
      }
      uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
        out[i] = packed(low(x[g][i]) * factor * bits_float(w[2 * i]), high(x[g][i]) * factor * bits_float(w[2 * i + 1]));
      *reinterpret_cast<uint4*>(p.x + uint64_t(row) * p.dim + channel) = {out[0], out[1], out[2], out[3]};
    }
    if (p.codes) write_codes(p, row, channel, out);
  }
}

// Few rows. Grid: blocks times groups of eight fn rows, then groups of rows_each rows. A warp has one
// row of fn in registers. The CTA that is last of its rows finishes them. HELD: a row alone, which
// nothing joins; what finishing reads of the site is read at once.
template <bool HELD>
DEVICE void run_step(const StreamsArgs& p) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  int block = static_cast<int>(blockIdx.x) % blocks, group = static_cast<int>(blockIdx.x) / blocks;
  int out = group * 8 + warp, channel = block * BLOCK + lane * 4;
  int first = blockIdx.y * p.rows_each, last = first + p.rows_each < p.rows ? first + p.rows_each : p.rows;
  bool multiplies = warp < 8 && out < p.outs, leads = group == 0 && warp == 0, passes = !HELD && p.y;
  uint4 fn[MULT];
#pragma unroll
  for (int k = 0; k < MULT; k++)
    if (multiplies) fn[k] = *reinterpret_cast<const uint4*>(p.fn + (uint64_t(out) * MULT + k) * p.dim + channel);
  SiteValues<HELD> site;
  if constexpr (HELD) site = load_site(p);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (multiplies) {
    for (int row = first; row < last; row++) {
      const uint16_t* streams = p.streams + uint64_t(row) * MULT * p.dim + channel;
      uint2 old[MULT], y = {0, 0};
      float post[MULT] = {}, mix[MULT * MULT] = {};
#pragma unroll
      for (int k = 0; k < MULT; k++) old[k] = *reinterpret_cast<const uint2*>(streams + k * p.dim);
      if (passes) {
        y = *reinterpret_cast<const uint2*>(p.y + uint64_t(row) * p.dim + channel);
#pragma unroll
        for (int k = 0; k < MULT; k++) post[k] = p.post[uint64_t(row) * MULT + k];
#pragma unroll
        for (int k = 0; k < MULT * MULT; k++) mix[k] = p.mix[uint64_t(row) * MULT * MULT + k];
      }
      float sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        uint2 stream = passes ? mix_four(old, y, post[k], mix + k) : old[k];
        if (leads && passes)
          *reinterpret_cast<uint2*>(p.mixed + (uint64_t(row) * MULT + k) * p.dim + channel) = stream;
        Four v = unpack_four(stream);
        uint32_t w[4] = {fn[k].x, fn[k].y, fn[k].z, fn[k].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          sum = fma_rn(bits_float(w[i]), v.v[i], sum);
          square = fma_rn(v.v[i], v.v[i], square);
        }
      }
      float* parts = p.partial + (uint64_t(row) * blocks + block) * PARTS;
      sum = warp_sum(sum);
      if (lane == 0) parts[out] = sum;
      if (leads) {
        square = warp_sum(square);
        if (lane == 0) parts[PARTS - 1] = square;
      }
    }
  }
  if (!p.counters) return;
  uint32_t* arrived = reinterpret_cast<uint32_t*>(shared + 9 * PARTS);
  sync_threads();
  if (threadIdx.x == 0) {
    if constexpr (!HELD) fence_device();
    *arrived = add_ordered(p.counters + blockIdx.y, 1);
  }
  sync_threads();
  if (*arrived != gridDim.x - 1) return;
  if (threadIdx.x == 0) p.counters[blockIdx.y] = 0;
  for (int row = first; row < last; row++) {
    finish_row(p, row, shared, site);
    sync_threads();
  }
}
