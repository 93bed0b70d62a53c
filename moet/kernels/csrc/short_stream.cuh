// Products of up to eight rows with one dense matrix: what stream_gemm.cuh does, sum for sum, where
// nothing but this case has to be told apart. A kernel that comes once a layer waits for its
// instructions; these are a third as many.
//
// A CTA has one slice of the columns of a few tiles of 64 weight rows; its warpgroups have half of
// these columns each.
#pragma once
#include "stream_gemm.cuh"

struct ShortArgs {
  const uint8_t* weights;
  const float* scales;  // fp8: of blocks of 128 x 128
  const void* x;        // e4m3 in MMA order with x_scale, or bf16
  const float* x_scale;
  void* out;
  float* partial;       // BY_COUNT: [slices, rows, ld_out]
  uint32_t* counters;   // BY_COUNT: one a tile, zero between launches
  int rows;                        // at most 8
  int ld_x, ld_x_scale, ld_out;    // from row to row
  int x_group, x_scale_group;      // from the input of group_tiles tiles to the next one's
  int x_scale_step;                // from a row's scale to its next
  int chunks, tiles, slices;
  int stages;                      // of a slice: even, a power of two
  int block_shift;                 // log2 of a slice's blocks of 32 bytes, 8 a stage
  int tiles_each, longer_runs;     // tiles of a CTA; so many runs have one more. BY_COUNT: at most SHORT_TILES
  int slice_stride;                // of partial
  uint32_t by_slices, by_group_tiles;  // for `divide`
};
constexpr int SHORT_TILES = 8;

// Who adds the slices: nobody, there is one; the last to arrive; the CTAs of a cluster.
enum Sum { WHOLE, BY_COUNT, BY_CLUSTER };

template <int CODEC, bool QUANTISE, int EPILOGUE, int SUM>
struct ShortStream {
  static constexpr int CPS = 2, STAGES = 2, BLOCKS = 4 * CPS;
  static constexpr int CODES = CPS * 64 * THREADS, STAGE_BYTES = CODES + (CODEC == FP8 ? CPS * 4 * THREADS : 0);

  const ShortArgs& p;
  uint8_t *activations, *ring;
  float *x_scales, *sums;
  uint32_t* last;  // of each tile, whether this CTA is the last of its slices
  int tid, lane, warp, group, slice;

  DEVICE ShortStream(const ShortArgs& args) : p(args) {
    tid = threadIdx.x;
    lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);  // so that the compiler knows it is one value a warp
    warp = uniform & 3;
    group = uniform >> 2;
    ring = dynamic_shared();
    activations = ring + STAGES * STAGE_BYTES;
    sums = reinterpret_cast<float*>(activations + p.stages * (CPS * 1024));
    last = reinterpret_cast<uint32_t*>(sums + 2 * 512);
    x_scales = reinterpret_cast<float*>(last + SHORT_TILES);
  }

  // The rows' columns of this slice as the B operand.
  DEVICE void load(int tile) {
    int input = divide(tile, p.by_group_tiles);
    if constexpr (QUANTISE)
      load_rounded(static_cast<const uint16_t*>(p.x) + uint64_t(input) * p.x_group);
    else
      load_plain(static_cast<const uint8_t*>(p.x) + uint64_t(input) * p.x_group * (CODEC == BF16 ? 2 : 1),
                 p.x_scale + uint64_t(input) * p.x_scale_group);
    fence_shared_for_matrix_units();
    sync_threads();
  }
  // Everything is asked for before anything is used.
  DEVICE void load_plain(const uint8_t* x, const float* scale) {
    int blocks = p.rows << p.block_shift, mask = (1 << p.block_shift) - 1;
    uint4 u[2], v[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int i = tid + j * THREADS;
      if (i >= blocks) break;
      const uint8_t* from = x + uint64_t(i >> p.block_shift) * p.ld_x * (CODEC == BF16 ? 2 : 1) +
                            ((slice << p.block_shift) + (i & mask)) * 32;
      u[j] = *reinterpret_cast<const uint4*>(from);
      v[j] = *reinterpret_cast<const uint4*>(from + 16);
    }
    if constexpr (CODEC == FP8) {
      int shift = p.block_shift - 2, chunk = tid & ((1 << shift) - 1), row = tid >> shift;
      if (row < p.rows)
        x_scales[chunk * 8 + row] = scale[uint64_t(row) * p.ld_x_scale + uint64_t((slice << shift) + chunk) * p.x_scale_step];
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int i = tid + j * THREADS;
      if (i >= blocks) break;
      uint8_t* to = activations + (i & mask) * 256 + (i >> p.block_shift) * 16;
      uint4 a = u[j], b = v[j];
      if constexpr (CODEC == BF16) {
        a = {u[j].x, u[j].z, v[j].x, v[j].z};
        b = {u[j].y, u[j].w, v[j].y, v[j].w};
      }
      *reinterpret_cast<uint4*>(to) = a;
      *reinterpret_cast<uint4*>(to + 128) = b;
    }
  }
  // Eight bf16 of a thread -> e4m3; the sixteen threads with a row's 128 columns share its scale.
  DEVICE void load_rounded(const uint16_t* x) {
    constexpr int AT_ONCE = 2;
    int shift = p.block_shift + 2, units = p.rows << shift, mask = (1 << shift) - 1;
#pragma unroll 1
    for (int first = tid; first < units; first += AT_ONCE * THREADS) {
      uint4 raw[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        int i = first + j * THREADS;
        if (i >= units) break;
        raw[j] = *reinterpret_cast<const uint4*>(x + uint64_t(i >> shift) * p.ld_x + ((slice << shift) + (i & mask)) * 8);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        int i = first + j * THREADS;
        if (i >= units) break;
        round_unit(raw[j], i >> shift, i & mask);
      }
    }
  }
  DEVICE void round_unit(const uint4& raw, int row, int unit) {
    uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      amax = larger(amax, bits_float((words[i] << 16) & 0x7FFFFFFFu));
      amax = larger(amax, bits_float(words[i] & 0x7FFF0000u));
    }
#pragma unroll
    for (int step = 8; step; step /= 2) amax = larger(amax, shuffle_xor(amax, step));
    int e = activation_exponent(amax);
    float inverse = power_of_two(-e);
    uint32_t q[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t lo = to_e4m3x2(bits_float(words[2 * i] << 16) * inverse, bits_float(words[2 * i] & 0xFFFF0000u) * inverse);
      uint32_t hi = to_e4m3x2(bits_float(words[2 * i + 1] << 16) * inverse, bits_float(words[2 * i + 1] & 0xFFFF0000u) * inverse);
      q[i] = lo | (hi << 16);
    }
    uint8_t* to = activations + (unit >> 2) * 256 + row * 16 + (unit & 3) * 4;
    *reinterpret_cast<uint32_t*>(to) = q[0];
    *reinterpret_cast<uint32_t*>(to + 128) = q[1];
    if ((unit & 15) == 0) x_scales[(unit >> 4) * 8 + row] = power_of_two(e);
  }

  // One stage of the ring: two chunks, both in flight.
  DEVICE void consume(int place, int stage, float* sum) {
    const uint8_t* from = ring + place * STAGE_BYTES + tid * 16;
    BOperand b = b_operand(activations + stage * (CPS * 1024), 0);
    uint32_t a[CPS][4][4];
    float part[CPS][4];
#pragma unroll
    for (int c = 0; c < CPS; c++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint4 v = *reinterpret_cast<const uint4*>(from + (4 * c + j) * (16 * THREADS));
        a[c][j][0] = v.x, a[c][j][1] = v.y, a[c][j][2] = v.z, a[c][j][3] = v.w;
      }
      mma_begin();
      if (c & 1)
        chunk_mma<CODEC, 1, 1>(part[c], a[c], b_advance(b, c * 1024), {0, 0, 0});
      else
        chunk_mma<CODEC, 1, 0>(part[c], a[c], b_advance(b, c * 1024), {0, 0, 0});
      mma_commit();
    }
#pragma unroll
    for (int c = 0; c < CPS; c++) {
      if (c == 0) mma_wait<1>();
      else mma_wait<0>();
      if constexpr (CODEC == FP8) {
        float2 x = *reinterpret_cast<const float2*>(x_scales + (stage * CPS + c) * 8 + 2 * (lane & 3));
        float scale = reinterpret_cast<const float*>(ring + place * STAGE_BYTES + CODES)[c * THREADS + tid];
        float s0 = x.x * scale, s1 = x.y * scale;
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fma_rn(part[c][i], i & 1 ? s1 : s0, sum[i]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += part[c][i];
      }
    }
  }

  // cta: this one's number; the slices of a run of tiles are neighbours.
  DEVICE void run(int cta) {
    int run = SUM == WHOLE ? cta : divide(cta, p.by_slices);
    slice = SUM == WHOLE ? 0 : cta - run * p.slices;
    int first = run * p.tiles_each + (run < p.longer_runs ? run : p.longer_runs);
    int count = p.tiles_each + (run < p.longer_runs);
    int half = p.stages / 2, steps = count * half, start = slice * p.stages + group * half;
    const int row_bytes = p.chunks * 2048;
    const uint8_t* codes = p.weights + uint64_t(first * 4 + warp) * row_bytes + start * (CPS * 2048) + lane * 16;
    const float* scales = CODEC == FP8 ? p.scales + (first >> 1) * p.chunks + start * CPS : nullptr;
    int copied = 0, stage = 0, tile = first, copied_tile = first;
    float sum[4] = {};
    if constexpr (SUM == BY_CLUSTER) expect_slices();
#pragma unroll 1
    for (int step = -STAGES; step < steps; step++) {
      int place = step & 1;
      if (step == 0) {
        if constexpr (SUM == BY_CLUSTER) wait_for_slices();
        wait_for_previous_kernel();
        let_next_kernel_start();
        load(first);
      }
      if (step >= 0) {
        wait_copies<STAGES - 1>();
        consume(place, group * half + stage, sum);
      }
      if (step + STAGES < steps) {
        uint8_t* to = ring + place * STAGE_BYTES + tid * 16;
#pragma unroll
        for (int i = 0; i < 4 * CPS; i++) copy16(to + i * (16 * THREADS), codes + i * 512, true);
        if constexpr (CODEC == FP8) {
          uint8_t* words = ring + place * STAGE_BYTES + CODES + tid * 4;
#pragma unroll
          for (int c = 0; c < CPS; c++) copy4(words + c * (4 * THREADS), scales + c, true);
          scales += CPS;
        }
        codes += CPS * 2048;
        if (++copied == half) {
          copied = 0;
          codes += 4 * row_bytes - half * (CPS * 2048);
          if constexpr (CODEC == FP8) scales += (copied_tile & 1) * p.chunks - half * CPS;
          copied_tile++;
        }
      }
      commit_copies();
      if (step < 0 || ++stage < half) continue;
      stage = 0;
      end_tile(tile++, sum);
    }
    if constexpr (SUM == BY_COUNT) add_slices(first, count);
  }

  // Adds the warpgroups' halves and leaves the slice's sums where the others of the tile find them.
  DEVICE void end_tile(int tile, float* sum) {
    // A thread may be a tile ahead, but in a cluster, whose CTAs have one.
    float* mine = sums + (SUM == BY_CLUSTER ? 0 : (tile & 1) * 512) + (tid & 127);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = fma_rn(sum[i], 1.0f, 0.0f);
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < 4; i++) mine[i * 128] = sum[i];
    }
    sync_threads();
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float total = sum[i] + mine[i * 128];
        int row = 2 * (lane & 3) + (i & 1), column = tile * 64 + warp * 16 + (lane >> 2) + 8 * (i >> 1);
        if (row >= p.rows)
          continue;
        else if constexpr (SUM == BY_CLUSTER)
          send(row, column - tile * 64, total);
        else if constexpr (SUM == WHOLE)
          store(row * p.ld_out + column, total);
        else
          p.partial[slice * p.slice_stride + row * p.ld_out + column] = total;
      }
    }
    if constexpr (SUM == BY_CLUSTER) add_sent(tile);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = 0.0f;
  }

  DEVICE void store(uint32_t to, float v) const {
    if constexpr (EPILOGUE == STORE_BF16)
      static_cast<uint16_t*>(p.out)[to] = to_bf16(v);
    else
      static_cast<float*>(p.out)[to] = v;
  }

  // The last slice of a tile to arrive adds all of them in their order. What is not there counts as
  // -0, which changes no sum.
  DEVICE void add_slices(int first, int count) {
    constexpr int AT_ONCE = 4;
    sync_threads();  // everybody's stores lie behind the threads that count
    if (tid < count) {
      uint32_t* counter = p.counters + first + tid;
      uint32_t all = add_ordered(counter, 1) + 1 == static_cast<uint32_t>(p.slices);
      if (all) *counter = 0;
      last[tid] = all;
    }
    sync_threads();
#pragma unroll 1
    for (int i = tid; i < count * p.rows * 64; i += THREADS) {
      int row = i >> 6, tile = 0;
      while (row >= p.rows) row -= p.rows, tile++;
      if (!last[tile]) continue;
      uint32_t at = row * p.ld_out + (first + tile) * 64 + (i & 63);
      float total = -0.0f;
#pragma unroll 1
      for (int s = 0; s < p.slices; s += AT_ONCE) {
        float part[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) part[j] = s + j < p.slices ? load_volatile(p.partial + (s + j) * p.slice_stride + at) : -0.0f;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) total += part[j];
      }
      store(at, total);
    }
  }

  // Each CTA of the cluster adds all slices, in their order, of its share of the columns of the only tile.
  DEVICE uint64_t* all_sent() const { return reinterpret_cast<uint64_t*>(last); }
  DEVICE float* gathered() const { return sums + 512; }  // [slices][rows][share]
  DEVICE void expect_slices() {
    if (tid == 0) {
      barrier_init(all_sent(), 1);
      barrier_arrive_expecting(all_sent(), p.rows * 64 * 4);
    }
    arrive_at_slices();
  }
  DEVICE void send(int row, int column, float v) {
    int share = divide(64, p.by_slices), rank = column * p.slices >> 6;
    send_to_rank(gathered() + (slice * p.rows + row) * share + column - rank * share, all_sent(), rank, v);
  }
  DEVICE void add_sent(int tile) {
    int share = divide(64, p.by_slices), column = (tid & 63) - slice * share;
    if (column < 0 || column >= share) return;
    barrier_wait(all_sent(), 0);
#pragma unroll 1
    for (int row = tid >> 6; row < p.rows; row += THREADS / 64) {
      const float* from = gathered() + row * share + column;
      float part[MAX_CLUSTER];
#pragma unroll
      for (int s = 0; s < MAX_CLUSTER; s++) part[s] = s < p.slices ? from[s * p.rows * share] : -0.0f;
      float total = part[0];
#pragma unroll
      for (int s = 1; s < MAX_CLUSTER; s++) total += part[s];
      store(row * p.ld_out + tile * 64 + (tid & 63), total);
    }
  }
};
