// Many rows: tiles of them times fn of a block in shared memory. Who finishes them is another launch.
#pragma once
#include "hyper_streams.cuh"

constexpr int TILE_THREADS = 256;
constexpr int TILE = MOET_SM == 90 ? 4 : 3;  // rows of a warp at once, as registers allow

// A lane's share of TILE rows: four channels of four streams times all rows of fn.
struct TileSums {
  float sum[TILE][MAX_OUTS], square[TILE];
};

DEVICE void load_rows(const StreamsArgs& p, int first, int last, int channel, uint2 (*old)[MULT], uint2* y) {
#pragma unroll
  for (int r = 0; r < TILE; r++) {
    int row = first + r < last ? first + r : last - 1;
#pragma unroll
    for (int k = 0; k < MULT; k++)
      old[r][k] = *reinterpret_cast<const uint2*>(p.streams + (uint64_t(row) * MULT + k) * p.dim + channel);
    if (p.y) y[r] = *reinterpret_cast<const uint2*>(p.y + uint64_t(row) * p.dim + channel);
  }
}

// Sums of all lanes of 32 values each; lane l gets value l in v[0], by the tree of warp_sum.
template <int HALF>
DEVICE void scatter_sums(float* v) {
  bool upper = threadIdx.x & HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    float send = upper ? v[i] : v[i + HALF], keep = upper ? v[i + HALF] : v[i];
    v[i] = add_rn(keep, shuffle_xor(send, HALF));
  }
  if constexpr (HALF > 1) scatter_sums<HALF / 2>(v);
}

// Many rows. Grid: blocks, then groups of rows_each rows. fn of a block lies in shared memory; a warp
// mixes and multiplies TILE rows at once.
DEVICE void run_tiles(const StreamsArgs& p) {
  uint4* fn = reinterpret_cast<uint4*>(dynamic_shared());  // [out][stream][lane]
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK, block = blockIdx.x;
  int channel = block * BLOCK + lane * 4;
  int first = blockIdx.y * p.rows_each, last = first + p.rows_each < p.rows ? first + p.rows_each : p.rows;
  for (int i = threadIdx.x; i < MAX_OUTS * MULT * 32; i += TILE_THREADS)
    fn[i] = *reinterpret_cast<const uint4*>(p.fn + uint64_t(i >> 5) * p.dim + block * BLOCK + (i & 31) * 4);
  wait_for_previous_kernel();
  let_next_kernel_start();
  sync_threads();
  uint2 old[TILE][MULT], y[TILE] = {};
  int row = first + warp * TILE;
  if (row < last) load_rows(p, row, last, channel, old, y);
#pragma unroll 1
  for (; row < last; row += 8 * TILE) {
    TileSums t = {};
#pragma unroll
    for (int k = 0; k < MULT; k++) {
      Four v[TILE];
#pragma unroll
      for (int r = 0; r < TILE; r++) {
        int at = row + r < last ? row + r : last - 1;
        uint2 stream = old[r][k];
        if (p.y) {
          stream = mix_four(old[r], y[r], p.post[uint64_t(at) * MULT + k], p.mix + uint64_t(at) * MULT * MULT + k);
          if (row + r < last)
            *reinterpret_cast<uint2*>(p.mixed + (uint64_t(at) * MULT + k) * p.dim + channel) = stream;
        }
        v[r] = unpack_four(stream);
#pragma unroll
        for (int i = 0; i < 4; i++) t.square[r] = fma_rn(v[r].v[i], v[r].v[i], t.square[r]);
      }
#pragma unroll
      for (int out = 0; out < MAX_OUTS; out++) {
        uint4 u = fn[(out * MULT + k) * 32 + lane];
        uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int r = 0; r < TILE; r++)
#pragma unroll
          for (int i = 0; i < 4; i++) t.sum[r][out] = fma_rn(bits_float(w[i]), v[r].v[i], t.sum[r][out]);
      }
    }
    if (row + 8 * TILE < last) load_rows(p, row + 8 * TILE, last, channel, old, y);
#pragma unroll
    for (int r = 0; r < TILE; r++) {
      float values[PARTS] = {};
#pragma unroll
      for (int out = 0; out < MAX_OUTS; out++) values[out] = t.sum[r][out];
      values[PARTS - 1] = t.square[r];
      scatter_sums<16>(values);
      if (row + r < last) p.partial[(uint64_t(row + r) * blocks + block) * PARTS + lane] = values[0];
    }
  }
}
