// Many rows: tiles of them times fn of a block in shared memory. Who finishes them is another launch. MIXED:
// y is summed from a mixture's parts, which have no weights.
#pragma once
#include "hyper_streams.cuh"

constexpr int TILE_THREADS = 256;
constexpr int TILE = MOET_SM == 90 ? 6 : 4;  // rows of a warp at once, as registers allow
constexpr int HALF_TILE = TILE / 2;

// What a warp mixes next: a tile's channels of a block, and its gates, post of all rows ahead of mix.
template <bool MIXED>
struct TileStage {
  uint2 streams[TILE][MULT][32], y[TILE][32];  // y: of MIXED the shared expert's
  uint2 parts[MIXED ? TILE : 0][MAX_PARTS][32];
  uint4 gates[TILE * (1 + MULT)];
  uint32_t ids[MIXED ? 8 : 0];  // upper words of the rows' first ones
};
template <bool MIXED>
struct TileShared {
  uint4 fn[MAX_OUTS][MULT][32];  // of a lane l: out 8d + r lies at 8d + (r ^ l / 4)
  TileStage<MIXED> stages[TILE_THREADS / 32];
};
static_assert(TILE % 2 == 0 && TILE * (1 + MULT) <= 32);

// Row r of a tile; behind the last one it is that again, and the same bits are stored twice.
DEVICE int row_of_tile(int first, int r, int last) {
  int row = first + r, end = last - 1;
  return row < end ? row : end;
}
// Where a row of `width` numbers begins.
template <typename T>
DEVICE const T* row_at(const T* p, int row, int width) {
  return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(p) + int64_t(row) * (width * int(sizeof(T))));
}

// A tile's channels and gates into shared memory.
template <bool MIXED>
DEVICE void copy_tile(const StreamsArgs& p, int first, int last, int block, TileStage<MIXED>& to) {
  int lane = threadIdx.x & 31, half = lane >> 4, piece = lane & 15, channel = block * BLOCK + piece * 8;
  const uint16_t* streams = p.streams + half * p.dim + channel;
#pragma unroll
  for (int r = 0; r < TILE; r++) {
    const uint16_t* from = row_at(streams, row_of_tile(first, r, last), MULT * p.dim);
#pragma unroll
    for (int k = 0; k < MULT; k += 2) copy16(&to.streams[r][k + half][2 * piece], from + k * p.dim, true);
  }
  if constexpr (MIXED) {
#pragma unroll
    for (int r = 0; r < TILE; r++) {
      const uint16_t* from = row_at(p.parts + half * p.dim + channel, row_of_tile(first, r, last), p.top_k * p.dim);
#pragma unroll
      for (int k = 0; k < MAX_PARTS; k += 2)
        if (k + half < p.top_k) copy16(&to.parts[r][k + half][2 * piece], from + k * p.dim, true);
    }
    const uint32_t* ids = reinterpret_cast<const uint32_t*>(p.expert_ids) + 1;
    if (lane < TILE) copy4(&to.ids[lane], row_at(ids, row_of_tile(first, lane, last), 2 * p.top_k), true);
  }
  if (MIXED || p.y) {
    const uint16_t* y = MIXED ? p.shared : p.y;
#pragma unroll
    for (int r = 0; r < TILE; r += 2)
      copy16(&to.y[r + half][2 * piece], row_at(y + channel, row_of_tile(first, r + half, last), p.dim), true);
    bool is_post = lane < TILE;
    int at = is_post ? lane : (lane - TILE) / MULT;
    const float* from = is_post ? p.post : p.mix + (lane - TILE) % MULT * MULT;
    from = row_at(from, row_of_tile(first, at, last), is_post ? MULT : MULT * MULT);
    if (lane < TILE * (1 + MULT)) copy16(&to.gates[lane], from, true);
  }
  commit_copies();
}

// A lane's channels of a row's y, from its parts.
DEVICE uint2 y_of_parts(const StreamsArgs& p, const TileStage<true>& s, int r) {
  int lane = threadIdx.x & 31;
  Parts parts;
  Shares shares;
  parts.shared = s.y[r][lane], shares.choices = s.ids[r] >> 31 ? 0 : p.top_k;
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    shares.weight[k] = 1.0f, parts.part[k] = {0, 0};
    if (k < p.top_k) parts.part[k] = s.parts[r][k][lane];
  }
  return add_parts(parts, shares);
}

// A lane's channels of a row's streams, mixed.
template <bool MIXED>
DEVICE void mix_row(const TileStage<MIXED>& s, int r, uint2* mixed) {
  int lane = threadIdx.x & 31;
  uint4 u = s.gates[r];
  uint32_t post[MULT] = {u.x, u.y, u.z, u.w};
  float mix[MULT * MULT];
  uint2 old[MULT], y = s.y[r][lane];
#pragma unroll
  for (int j = 0; j < MULT; j++) {
    u = s.gates[TILE + r * MULT + j];
    old[j] = s.streams[r][j][lane];
    mix[j * MULT] = bits_float(u.x), mix[j * MULT + 1] = bits_float(u.y);
    mix[j * MULT + 2] = bits_float(u.z), mix[j * MULT + 3] = bits_float(u.w);
  }
#pragma unroll
  for (int k = 0; k < MULT; k++) {
    Four sum = mix_unrounded(old, y, bits_float(post[k]), mix + k);
    mixed[k] = {packed_at_once(sum.v[0], sum.v[1]), packed_at_once(sum.v[2], sum.v[3])};
  }
}

// A lane's share of a tile: four channels of four streams times all rows of fn.
struct TileSums {
  float sum[TILE][MAX_OUTS], square[TILE];
};

// Two sums by one exchange: of `low` for lanes whose bit is clear, of `high` for the others.
template <int BIT>
DEVICE float add_one_of(float low, float high) {
  bool upper = threadIdx.x & BIT;
  float keep = upper ? high : low, send = upper ? low : high;
  return add_rn(keep, shuffle_xor(send, BIT));
}

// The tree of warp_sum. As lanes hold outs in orders of their own, the first levels have nothing to choose.
// Lane l ends with out l / 4 of groups l % 2 and l % 2 + 2 of rows i + (l & 2 ? HALF_TILE : 0); the fourth
// group is the squares.
DEVICE void add_lanes(TileSums& t, float (*out)[2]) {
#pragma unroll
  for (int level = 4; level; level /= 2)
#pragma unroll
    for (int row = 0; row < TILE; row++) {
#pragma unroll
      for (int d = 0; d < MAX_OUTS; d += 8)
#pragma unroll
        for (int r = 0; r < level; r++)
          t.sum[row][d + r] = add_rn(t.sum[row][d + r], shuffle_xor(t.sum[row][d + r + level], 4 * level));
      t.square[row] = add_rn(t.square[row], shuffle_xor(t.square[row], 4 * level));
    }
#pragma unroll
  for (int i = 0; i < HALF_TILE; i++) {
    float group[4];
#pragma unroll
    for (int g = 0; g < 3; g++) group[g] = add_one_of<2>(t.sum[i][8 * g], t.sum[i + HALF_TILE][8 * g]);
    group[3] = add_one_of<2>(t.square[i], t.square[i + HALF_TILE]);
    out[i][0] = add_one_of<1>(group[0], group[1]);
    out[i][1] = add_one_of<1>(group[2], group[3]);
  }
}

// Many rows. Grid: blocks, then groups of rows_each rows. fn of a block lies in shared memory; a warp
// mixes and multiplies a tile while its next one is copied.
template <bool MIXED>
DEVICE void run_tiles(const StreamsArgs& p) {
  TileShared<MIXED>& s = *reinterpret_cast<TileShared<MIXED>*>(dynamic_shared());
  int warp = shuffle(threadIdx.x >> 5, 0), lane = threadIdx.x & 31, block = blockIdx.x;
  int first = blockIdx.y * p.rows_each, last = first + p.rows_each < p.rows ? first + p.rows_each : p.rows;
  int row = first + warp * TILE;
  TileStage<MIXED>& stage = s.stages[warp];
  uint16_t* kept = p.mixed + block * BLOCK + lane * 4;
  for (int i = warp; i < MAX_OUTS * MULT; i += TILE_THREADS / 32) {
    int out = i / MULT, k = i % MULT;
    copy16(&s.fn[out][k][lane],
           p.fn + uint64_t((out ^ lane >> 2) * MULT + k) * p.dim + block * BLOCK + lane * 4, true);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (row < last) copy_tile(p, row, last, block, stage);
  wait_copies<0>();
  sync_threads();
#pragma unroll 1
  for (; row < last; row += TILE_THREADS / 32 * TILE) {
    uint2 mixed[TILE][MULT];
    wait_copies<0>();
    sync_warp();
    if constexpr (MIXED) {
#pragma unroll 2
      for (int r = 0; r < TILE; r++) stage.y[r][lane] = y_of_parts(p, stage, r);
    }
    if (MIXED || p.y) {
#pragma unroll
      for (int r = 0; r < TILE; r++) {
        mix_row(stage, r, mixed[r]);
        int64_t to = int64_t(row_of_tile(row, r, last)) * (MULT * p.dim);
#pragma unroll
        for (int k = 0; k < MULT; k++) store_whole(reinterpret_cast<uint2*>(kept + to + k * p.dim), mixed[r][k]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < TILE; r++)
#pragma unroll
        for (int k = 0; k < MULT; k++) mixed[r][k] = stage.streams[r][k][lane];
    }
    sync_warp();
    int next = row + TILE_THREADS / 32 * TILE;
    if (next < last) copy_tile(p, next, last, block, stage);
    TileSums t = {};
#pragma unroll
    for (int k = 0; k < MULT; k++) {
      Four v[TILE];
#pragma unroll
      for (int r = 0; r < TILE; r++) {
        v[r] = unpack_four(mixed[r][k]);
#pragma unroll
        for (int i = 0; i < 4; i++) t.square[r] = fma_rn(v[r].v[i], v[r].v[i], t.square[r]);
      }
#pragma unroll
      for (int out = 0; out < MAX_OUTS; out++) {
        uint4 u = s.fn[out][k][lane];
        uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int r = 0; r < TILE; r++)
#pragma unroll
          for (int i = 0; i < 4; i++) t.sum[r][out] = fma_rn(bits_float(w[i]), v[r].v[i], t.sum[r][out]);
      }
    }
    float out[HALF_TILE][2];
    add_lanes(t, out);
#pragma unroll
    for (int i = 0; i < HALF_TILE; i++) {
      int at = row_of_tile(row, lane & 2 ? i + HALF_TILE : i, last);
      float* to = p.partial + (uint64_t(at) * (p.dim / BLOCK) + block) * PARTS + (lane & 1) * 8 + (lane >> 2);
      to[0] = out[i][0], to[16] = out[i][1];
    }
  }
}
