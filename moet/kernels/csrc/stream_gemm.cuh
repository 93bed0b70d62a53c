// Skinny GEMM by weight streaming: out[row, n] = sum_k x[row, k] W[n, k], W read once, in plane order.
//
// A CTA of two warpgroups walks a contiguous run of items; an item is 64 weight rows of one entry (an
// expert with up to 8 NT rows, or a tile of dense rows). Its columns are summed as two halves, split
// where the shape alone says. With few items the two warpgroups take one half each, with many they
// take items of their own and both halves in turn: the same sums in the same order. Each lane streams
// its own words through a private ring in shared memory, so copies need no barriers. A row's result
// does not depend on the other rows, on the grid, or on who took the item.
#pragma once
#include "cluster.cuh"
#include "grid_sync.cuh"
#include "nvfp4.cuh"

constexpr int THREADS = 256;
constexpr int MAX_CLUSTER = 8;
constexpr int LIST_ROWS = 64;

struct alignas(16) Entry {
  int slot;    // where the weights are; row of `weights`
  int expert;  // row of `bases`
  int first;   // first of its places in `pairs`
  int count;   // rows, at most 8 NT
};

// A work list in shared memory, of at most LIST_ROWS rows and so of no more entries.
struct List {
  Entry entries[LIST_ROWS];
  int rows[LIST_ROWS];       // of each place
  float weights[LIST_ROWS];  // of each row
};

// One matrix of a weight row: byte offsets of its planes in a segment, and of its row bases (NVFP4:
// of its scale in a segment).
struct Part {
  uint32_t codes, scales, bases;
};

// What kernels divide by, as factors for `divide`: a kernel that divides begins late.
struct Inverses {
  uint32_t slices, tiles, tiles_per_segment, segment_stages, x_divisor, ctas;
};
// Rounded down. inverse: ceil(2^32 / d), 0 for d = 1; exact while a * d < 2^32.
DEVICE int divide(int a, uint32_t inverse) { return inverse ? static_cast<int>(uint64_t(uint32_t(a)) * inverse >> 32) : a; }

struct StreamArgs {
  const uint8_t* weights;
  const uint8_t* bases;   // W2, MXFP4: row bases; FP8: fp32 scales of 128 x 128 blocks
  const void* x;          // e4m3 in plane order with x_scale, or bf16 row-major
  const float* x_scale;   // [rows, K / 128], for e4m3
  void* out;
  float* partial;         // [slices, rows, ld_out], for slices > 1
  uint32_t* counters;     // one per item of a slice, zero between launches
  const Entry* entries;   // null: dense, entry e is rows 8 NT e .. of num_rows
  const int* num_entries;
  const int* pairs;       // row (token * top_k + choice) of each place; null: the place itself
  const float* pair_weight;  // router weight of each row, or null
  uint32_t* error;        // error word of the device
  uint64_t row_stride;    // bytes from slot to slot
  uint64_t base_stride;   // from expert to expert
  uint32_t segment_stride, base_segment_stride;
  Part parts[2];          // gate and up, or the one matrix twice
  int num_slots;
  int num_rows;           // of out
  int k;                  // columns of x, a multiple of 32
  int x_divisor;          // input row of a pair is pair / x_divisor
  int ld_x, ld_x_scale, ld_out;
  int x_group_stride;     // from a row's scale to its next
  int padded_rows;        // prefill: weight rows in a plane
  int segments;           // weight segments (sub-rows) that are summed
  int chunks;             // chunks of columns in a segment
  int tiles;              // items of an entry and slice
  int tiles_per_segment;  // of the outputs; tiles for one segment of outputs
  int columns;            // outputs in a segment of outputs
  int slices;             // of the columns, over CTAs
  int first_half_stages;  // of a slice; the rest is the second half. Prefill: chunks
  int early;              // entries were written before the previous kernel: may prefetch at once
  float swiglu_limit;
  Masks masks;
  Inverses inverse;
};

// A place in the run of items (entry, tile, slice), slice fastest. Steps without division.
struct Cursor {
  int item, entry, slice, segment, in_segment;  // the tile is segment * tiles_per_segment + in_segment

  DEVICE void seek(const StreamArgs& p, int to) {
    item = to;
    int tiles_before = divide(to, p.inverse.slices);
    slice = to - tiles_before * p.slices;
    entry = divide(tiles_before, p.inverse.tiles);
    int tile = tiles_before - entry * p.tiles;
    segment = divide(tile, p.inverse.tiles_per_segment);
    in_segment = tile - segment * p.tiles_per_segment;
  }
  // unit: 1 or, when tiles and tiles_per_segment are even and slices is 1, 2.
  DEVICE void step(const StreamArgs& p, int unit) {
    item += unit;
    if (++slice < p.slices) return;
    slice = 0;
    in_segment += unit;
    if (in_segment < p.tiles_per_segment) return;
    in_segment -= p.tiles_per_segment;
    if (++segment * p.tiles_per_segment >= p.tiles) segment = 0, entry++;
  }
};

// silu(min(gate, limit)) * clamp(up, limit) of products rounded to bf16, as linear layers return them.
DEVICE float swiglu_of(float gate, float up, float limit) {
  float g = round_to_bf16(gate), u = round_to_bf16(up);
  g = g > limit ? limit : g;  // one-sided, as trained
  u = u > limit ? limit : u < -limit ? -limit : u;
  return div_approx(g, 1.0f + exp_approx(-g)) * u;
}

enum Epilogue { STORE_F32, STORE_BF16, SWIGLU };
enum ErrorBit { INVALID_SLOT = 1, INVALID_COUNT = 2 };

// NT: groups of eight rows of an entry. 0 (NVFP4): up to four rows, each in two columns, see nvfp4.cuh.
// CLUSTER: the CTAs of a cluster have the slices of one item, one each, and sum them among themselves.
// ALL_TOKENS: of at most MAX_ROWS tokens all are columns of every item, loaded once, before the work list
// is there; the kernel ahead wrote none of them.
// LISTED: the work list, which has room for all rows, is read at once and kept in shared memory.
template <int CODEC, int NT, int EPILOGUE, int STAGES, bool QUANTISE, bool OVERLAP, bool CLUSTER = false, bool ALL_TOKENS = false,
          bool LISTED = false>
struct StreamGemm {
  static constexpr int CPS = chunks_per_stage(CODEC);
  static constexpr int CODE_BYTES = CODEC == NVFP4 ? 1024 : chunk_bytes(CODEC);
  static constexpr int WORDS = CODE_BYTES / 512;          // uint4 of a lane in a chunk
  static constexpr bool SCALED = CODEC != BF16;           // activations carry scales
  static constexpr int SCALE_WORDS = has_scale_plane(CODEC) ? CPS / 2 : CODEC == BF16 ? 0 : CPS;
  static constexpr int STAGE_BYTES = CPS * WORDS * 16 + SCALE_WORDS * 4 + (has_scale_plane(CODEC) ? 4 : 0);
  static constexpr bool FEW = NT == 0;
  static_assert(!FEW || CODEC == NVFP4, "only its blocks need columns of their own");
  static constexpr int MAX_ROWS = FEW ? 4 : 8 * NT;
  static constexpr int GROUPS = FEW ? 1 : NT;             // of eight columns
  static constexpr int VALUES = FEW ? 2 : 4 * NT;         // sums of a lane
  // Instances for few experts only ever share items, and save the registers of a second half.
  static constexpr bool FEW_EXPERTS = !OVERLAP && NT == 1;
  // Those of all tokens share them, too: pairs of items end no sooner, and fewer CTAs would have any.
  static constexpr bool ALWAYS_SHARED = FEW_EXPERTS || ALL_TOKENS;
  // Instances for many experts keep an entry's rows instead of asking for them with every item.
  static constexpr bool KEEPS_ROWS = (CODEC == W2 && OVERLAP && NT == 1 && !CLUSTER) || ALL_TOKENS;
  static constexpr bool LOADS_FIRST = CODEC == W2 && KEEPS_ROWS && MOET_SM == 90;

  const StreamArgs& p;
  uint8_t* activations;
  float* x_scales;
  float* reduction;
  uint8_t* ring;
  int tid, lane, warp, group;
  int stages_per_segment, slice_stages, first_item, last_item;
  int cta, ctas;          // this one's number among those that divide the items
  TableOf<CODEC> table;

  float tensor_scale;     // NVFP4: of this warp's matrix and entry
  int parity;             // of the item, for buffers that two items may use at once
  bool shared;            // the warpgroups take halves of the same items

  int out_row[2];         // KEEPS_ROWS: of out, of this lane's two tokens; -1 for none

  // The producer's place: which item and stage it copies next, and from where.
  Cursor next, first;     // first: of this warpgroup
  int next_stage, next_in_segment;
  uint64_t codes, scales, bases;  // addresses; offsets until aimed
  int aimed_entry;
  const uint8_t *row_start, *base_start;

  DEVICE StreamGemm(const StreamArgs& args) : StreamGemm(args, blockIdx.x, gridDim.x) {}
  DEVICE StreamGemm(const StreamArgs& args, int number, int of) : p(args), cta(number), ctas(of), table(args.masks) {
    tid = threadIdx.x;
    lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);  // so that the compiler knows it is one value a warp
    warp = uniform & 3;
    group = uniform >> 2;
    stages_per_segment = (p.chunks + CPS - 1) / CPS;
    slice_stages = divide(p.segments * stages_per_segment, p.inverse.slices);
    uint8_t* shared = dynamic_shared();
    activations = shared;
    x_scales = reinterpret_cast<float*>(shared + GROUPS * slice_stages * CPS * 1024);
    reduction = x_scales + (SCALED ? slice_stages * CPS * 8 * GROUPS : 0);
    ring = reinterpret_cast<uint8_t*>(reduction + 2 * GROUPS * 4 * 128);
  }

  DEVICE bool shared_items() const { return ALWAYS_SHARED || shared; }
  DEVICE int first_stage() const { return shared_items() && group ? p.first_half_stages : 0; }
  DEVICE int end_stage() const { return shared_items() && !group ? p.first_half_stages : slice_stages; }

  DEVICE List& list() const { return *reinterpret_cast<List*>(ring + STAGES * STAGE_BYTES * THREADS); }
  DEVICE Entry entry(int e) const {
    if constexpr (LISTED) return list().entries[e];
    if (p.entries) return p.entries[e];
    int first = e * MAX_ROWS, left = p.num_rows - first;
    return {0, 0, first, left < MAX_ROWS ? left : MAX_ROWS};
  }

  // Where the first stage of the producer's item is in its entry's weights.
  DEVICE void place() {
    // SWIGLU: warps 0, 1 take 32 gate rows and warps 2, 3 the same rows of up.
    const Part& part = p.parts[EPILOGUE == SWIGLU ? warp >> 1 : 0];
    int row_tile = EPILOGUE == SWIGLU ? next.in_segment * 2 + (warp & 1) : next.in_segment * 4 + warp;
    uint64_t row = next.segment * uint64_t(p.segment_stride);
    codes = row + part.codes + uint64_t(row_tile) * (p.chunks * CODE_BYTES);
    if constexpr (has_scale_plane(CODEC)) {
      scales = row + part.scales + row_tile * ((p.chunks + 1) / 2 * 128) - lane * 12;
      bases = next.segment * p.base_segment_stride + part.bases + row_tile * 16 + base_row() / 4 * 4;
    } else if constexpr (CODEC == NVFP4) {
      scales = row + part.scales + row_tile * (p.chunks * 128) - lane * 12;
    } else if constexpr (CODEC == FP8) {
      scales = part.bases + row_tile / 8 * (p.chunks * 4);
    }
    int s = next.slice * slice_stages + first_stage();
    int segment = divide(s, p.inverse.segment_stages);
    next_in_segment = s - segment * stages_per_segment;
    codes += segment * uint64_t(p.segment_stride) + next_in_segment * (CPS * CODE_BYTES);
    if constexpr (has_scale_plane(CODEC)) {
      scales += segment * uint64_t(p.segment_stride) + next_in_segment * (CPS / 2 * 128);
      bases += segment * uint64_t(p.base_segment_stride);
    } else if constexpr (CODEC == NVFP4) {
      scales += segment * uint64_t(p.segment_stride) + next_in_segment * (CPS * 128);
    } else if constexpr (CODEC == FP8) {
      scales += next_in_segment * (CPS * 4);
    }
  }
  // Points the producer at what place() has found.
  DEVICE void aim() {
    next_stage = first_stage();
    if (FEW_EXPERTS || next.entry != aimed_entry) {
      aimed_entry = next.entry;
      Entry t = entry(next.entry);
      if (t.slot < 0 || t.slot >= p.num_slots) t.slot = t.expert = 0;  // reported by the consumer
      row_start = p.weights + t.slot * p.row_stride + lane * 16;
      base_start = p.bases + t.expert * p.base_stride;
    }
    codes += reinterpret_cast<uint64_t>(row_start);
    if constexpr (SCALE_WORDS > 0) scales += reinterpret_cast<uint64_t>(CODEC == FP8 ? base_start : row_start);
    if constexpr (has_scale_plane(CODEC)) bases += reinterpret_cast<uint64_t>(base_start);
  }
  DEVICE uint32_t group_bytes() const { return CODEC == NVFP4 ? 0 : slice_stages * CPS * 1024; }  // of eight tokens
  DEVICE int base_row() const { return (lane >> 2) + 8 * (lane & 1); }

  DEVICE static const void* address(uint64_t a) { return reinterpret_cast<const void*>(a); }
  DEVICE uint8_t* ring_stage(int s) const { return ring + s * (STAGE_BYTES * THREADS); }

  // Copies the producer's stage into ring place s, then steps. Commits a group in any case.
  DEVICE void produce(int s) {
    if (next.item < last_item && first_stage() < end_stage()) {
      if (next_stage == end_stage()) {
        if constexpr (!LISTED) place();
        aim();
      }
      uint8_t* to = ring_stage(s) + tid * 16;
      int left = p.chunks - next_in_segment * CPS;
#pragma unroll
      for (int i = 0; i < CPS * WORDS; i++)
        copy16(to + i * (16 * THREADS), address(codes + i * 512), i / WORDS < left);
      codes += CPS * CODE_BYTES;
      uint8_t* words = ring_stage(s) + CPS * WORDS * 16 * THREADS + tid * 4;
      if constexpr (has_scale_plane(CODEC)) {
#pragma unroll
        for (int i = 0; i < SCALE_WORDS; i++)
          copy4(words + i * (4 * THREADS), address(scales + i * 128), 2 * i < left);
        copy4(words + SCALE_WORDS * (4 * THREADS), address(bases), true);
        scales += CPS / 2 * 128;
      } else if constexpr (SCALE_WORDS > 0) {
        constexpr int APART = CODEC == FP8 ? 4 : 128;
#pragma unroll
        for (int i = 0; i < SCALE_WORDS; i++) copy4(words + i * (4 * THREADS), address(scales + i * APART), i < left);
        scales += CPS * APART;
      }
      if (++next_in_segment == stages_per_segment) next_segment();
      if (++next_stage == end_stage()) {
        next.step(p, shared_items() ? 1 : 2);
        if constexpr (LISTED) place();
      }
    }
    commit_copies();
  }
  DEVICE void next_segment() {
    next_in_segment = 0;
    codes += uint64_t(p.segment_stride) - stages_per_segment * (CPS * CODE_BYTES);
    if constexpr (has_scale_plane(CODEC)) {
      scales += uint64_t(p.segment_stride) - stages_per_segment * (CPS / 2 * 128);
      bases += p.base_segment_stride;
    } else if constexpr (CODEC == NVFP4) {
      scales += uint64_t(p.segment_stride) - stages_per_segment * (CPS * 128);
    }
  }

  DEVICE int source_row(const Entry& t, int i) const {
    int place = t.first + i;
    if constexpr (LISTED) return list().rows[place];
    return p.pairs ? p.pairs[place] : place;
  }
  DEVICE int input_row(const Entry& t, int i) const {
    return ALL_TOKENS ? i : divide(source_row(t, i), p.inverse.x_divisor);
  }
  // The rows of out of this lane's two tokens, of all of which ALL_TOKENS has loaded.
  DEVICE void find_rows(const Entry& t) {
    out_row[0] = out_row[1] = -1;
#pragma unroll 1
    for (int j = 0; j < t.count; j++) {
      int row = source_row(t, j), token = divide(row, p.inverse.x_divisor);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (token == token_of(i)) out_row[i] = row;
    }
  }
  // The row of out of this lane's value i; -1 for none.
  DEVICE int row_of_value(const Entry& t, int i) const {
    int token = token_of(i);
    if (!ALL_TOKENS) return token < t.count ? source_row(t, token) : -1;
    int found = -1;
    for (int j = 0; j < t.count; j++) {
      int row = source_row(t, j);
      if (divide(row, p.inverse.x_divisor) == token) found = row;
    }
    return found;
  }

  // Puts the entry's rows, columns of one slice, into shared memory as the B operand. What no row
  // fills is left as it is: a matrix instruction keeps its columns apart.
  DEVICE void load_activations(const Entry& t, int slice) {
    int spread = 0;  // 2^spread tokens of a block lie side by side
    while (1 << spread < t.count) spread++;
    const int blocks = (slice_stages * CPS * 4) << spread;  // of 32 bytes of a row
    const int rounded = QUANTISE ? (blocks + 31) & ~31 : blocks;  // whole warps reach the shuffles
    for (int i = tid; i < rounded; i += THREADS) {
      int token = i & ((1 << spread) - 1), block = i >> spread;
      uint8_t* to = activations + (token >> 3) * (slice_stages * CPS * 1024) + block * 256 + (token & 7) * (FEW ? 32 : 16);
      // Columns of a slice in bytes of x; segments are adjacent in x without their padding.
      int stage = slice * slice_stages + block / (4 * CPS), segment = divide(stage, p.inverse.segment_stages);
      int in_segment = (stage - segment * stages_per_segment) * 4 * CPS + block % (4 * CPS);
      bool valid = i < blocks && token < t.count && in_segment < p.chunks * 4;
      int column = (segment * p.chunks * 4 + in_segment) * (CODEC == BF16 ? 16 : 32);
      valid = valid && column < p.k;
      uint4 a = {0, 0, 0, 0}, b = a;
      int row = valid ? input_row(t, token) : 0;
      if constexpr (QUANTISE) {
        int exponent = quantise_block(valid, row, column, 1 << spread, a, b);
        if (i >= blocks) break;
        if ((block & 3) == 0) x_scales[(block >> 2) * (8 * GROUPS) + token] = power_of_two(exponent);
      } else if (valid) {
        const uint8_t* from = static_cast<const uint8_t*>(p.x) +
                              (uint64_t(row) * p.ld_x + column) * (CODEC == BF16 ? 2 : 1);
        uint4 u = *reinterpret_cast<const uint4*>(from);
        uint4 v = *reinterpret_cast<const uint4*>(from + 16);
        if constexpr (CODEC == BF16) {
          a = {u.x, u.z, v.x, v.z};
          b = {u.y, u.w, v.y, v.w};
        } else {
          a = u, b = v;
        }
      }
      if constexpr (FEW) {  // the first half of the columns, then the second
        *reinterpret_cast<uint4*>(to) = {a.x, a.y, 0, 0};
        *reinterpret_cast<uint4*>(to + 16) = {0, 0, a.z, a.w};
        *reinterpret_cast<uint4*>(to + 128) = {b.x, b.y, 0, 0};
        *reinterpret_cast<uint4*>(to + 144) = {0, 0, b.z, b.w};
      } else {
        *reinterpret_cast<uint4*>(to) = a;
        *reinterpret_cast<uint4*>(to + 128) = b;
      }
      if constexpr (SCALED && !QUANTISE) {
        if ((block & 3) == 0)
          x_scales[(block >> 2) * (8 * GROUPS) + token] =
              valid ? p.x_scale[uint64_t(row) * p.ld_x_scale + uint64_t(column / 128) * p.x_group_stride] : 0.0f;
      }
    }
  }

  // As load_activations with QUANTISE. Sixteen lanes have 128 columns of a row, so that more of them take part
  // and each has less to do.
  DEVICE void quantise_rows(const Entry& t) {
    static_assert(!QUANTISE || GROUPS == 1, "of up to eight rows");
    const int quarters = slice_stages * CPS * 16;  // of blocks of 32 columns
#pragma unroll 1
    for (int token = 0; token < t.count; token++) {
      const uint16_t* row = static_cast<const uint16_t*>(p.x) + uint64_t(source_row(t, token)) * p.ld_x;
#pragma unroll 1
      for (int i = tid; i < quarters; i += THREADS) {  // whole warps
        int block = i >> 2, stage = block / (4 * CPS), segment = divide(stage, p.inverse.segment_stages);
        int in_segment = (stage - segment * stages_per_segment) * 4 * CPS + block % (4 * CPS);
        int column = (segment * p.chunks * 4 + in_segment) * 32 + (i & 3) * 8;
        uint4 v = {0, 0, 0, 0};
        if (in_segment < p.chunks * 4 && column < p.k) v = *reinterpret_cast<const uint4*>(row + column);
        uint32_t words[16] = {v.x, v.y, v.z, v.w};  // the rest is for nothing
        float amax = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          amax = larger(amax, bits_float((words[j] << 16) & 0x7FFFFFFFu));
          amax = larger(amax, bits_float(words[j] & 0x7FFF0000u));
        }
#pragma unroll
        for (int apart = 1; apart < 16; apart *= 2) amax = larger(amax, shuffle_xor(amax, apart));
        int e = activation_exponent(amax);
        uint4 a, b;
        quantise_words(words, power_of_two(-e), a, b);
        uint32_t* to = reinterpret_cast<uint32_t*>(activations + block * 256 + token * 16) + (i & 3);
        to[0] = a.x, to[32] = b.x;
        if (i % 16 == 0) x_scales[(block >> 2) * 8 + token] = power_of_two(e);
      }
    }
  }

  // As load_activations for ALL_TOKENS; the copies are on their way.
  DEVICE void copy_tokens(int tokens) {
    static_assert(!FEW && !QUANTISE && NT < 2, "codes as they are");
    int spread = 0;
    while (1 << spread < tokens) spread++;
#pragma unroll 1
    for (int i = tid; i < (slice_stages * CPS * 4) << spread; i += THREADS) {
      int token = i & ((1 << spread) - 1), block = i >> spread;
      bool valid = token < tokens && block < p.chunks * 4 && block * 32 < p.k;
      const uint8_t* from = static_cast<const uint8_t*>(p.x) + (valid ? token * p.ld_x + block * 32 : 0);
      uint8_t* to = activations + block * 256 + token * 16;
      copy16(to, from, valid);
      copy16(to + 128, from + 16, valid);
      const float* scale = p.x_scale + (valid ? token * p.ld_x_scale + (block >> 2) * p.x_group_stride : 0);
      if ((block & 3) == 0) copy4(x_scales + (block >> 2) * 8 + token, scale, valid);
    }
    commit_copies();
  }

  // 32 bf16 of a row -> e4m3; the four lanes with a row's 128 columns share its scale. apart: of two
  // such lanes. Returns the scale's exponent.
  DEVICE int quantise_block(bool valid, int row, int column, int apart, uint4& a, uint4& b) {
    static_assert(!QUANTISE || GROUPS == 1, "the four lanes lie in one warp");
    uint32_t words[16];
    load_bf16x32(static_cast<const uint16_t*>(p.x) + uint64_t(row) * p.ld_x + column, valid, words);
    float amax = largest_of(words);
    amax = larger(amax, shuffle_xor(amax, apart));
    amax = larger(amax, shuffle_xor(amax, 2 * apart));
    int e = activation_exponent(amax);
    quantise_words(words, power_of_two(-e), a, b);
    return e;
  }

  // part[VALUES] times the scales of chunk c is added to sum.
  DEVICE void fold(float* sum, const float* part, int chunk, float weight_scale) const {
    if constexpr (FEW) {
      float s = x_scales[chunk * 8 + (lane & 3)];
      sum[0] = fma_rn(part[0], s, sum[0]);
      sum[1] = fma_rn(part[1], s, sum[1]);
    } else if constexpr (SCALED) {
      const float* s = x_scales + chunk * MAX_ROWS + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float s0 = s[8 * n], s1 = s[8 * n + 1];
        if constexpr (CODEC == FP8) s0 *= weight_scale, s1 *= weight_scale;
        sum[4 * n] = fma_rn(part[4 * n], s0, sum[4 * n]);
        sum[4 * n + 1] = fma_rn(part[4 * n + 1], s1, sum[4 * n + 1]);
        sum[4 * n + 2] = fma_rn(part[4 * n + 2], s0, sum[4 * n + 2]);
        sum[4 * n + 3] = fma_rn(part[4 * n + 3], s1, sum[4 * n + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * NT; i++) sum[i] += part[i];
    }
  }

  // The code words of a lane in a chunk of ring place s.
  DEVICE void load_codes(int s, int chunk, uint32_t* words) const {
    const uint8_t* from = ring_stage(s) + tid * 16 + chunk * (WORDS * 16 * THREADS);
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      uint4 v = *reinterpret_cast<const uint4*>(from + i * (16 * THREADS));
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
  // This lane's scale words of ring place s, THREADS apart; behind them its base.
  DEVICE const uint32_t* scale_words(int s) const {
    return reinterpret_cast<const uint32_t*>(ring_stage(s) + CPS * WORDS * 16 * THREADS) + tid;
  }
  DEVICE uint32_t load_base(int s) const {
    return scale_words(s)[SCALE_WORDS * THREADS] >> (8 * (base_row() & 3)) & 0xFF;
  }

  // One stage of W2. All that is read from shared memory comes first, so that no chunk waits for it
  // behind the matrix units.
  DEVICE void consume_w2(int s, int stage, float* sum, uint32_t& base) {
    uint32_t words[CPS / 2], codes[CPS][4 * WORDS], exponents[CPS][2];
    float2 factors[CPS];
#pragma unroll
    for (int c = 0; c < CPS / 2; c++) words[c] = scale_words(s)[c * THREADS];
#pragma unroll
    for (int c = 0; c < CPS; c++) load_codes(s, c, codes[c]);
#pragma unroll
    for (int c = 0; c < CPS; c++)
      factors[c] = *reinterpret_cast<const float2*>(x_scales + (stage * CPS + c) * MAX_ROWS + 2 * (lane & 3));
    base = load_base(s);
#pragma unroll
    for (int c = 0; c < CPS; c += 2) {
      uint32_t e = saturating_subtract(words[c / 2], base * 0x01010101u) << 2;
#pragma unroll
      for (int i = 0; i < 4; i++) exponents[c + i / 2][i & 1] = shuffle(e, (lane & ~3) + i);
    }
    BOperand b = b_operand(activations + stage * (CPS * 1024), group_bytes());
    uint32_t a[2][4][4];
    float part[2][4];
#pragma unroll
    for (int c = 0; c <= CPS; c++) {
      if (c < CPS) {
        RowScale scale = {exponents[c][0], exponents[c][1], 0};
#pragma unroll
        for (int j = 0; j < 4; j++) decode_block<CODEC>(codes[c], j, scale, p.masks, a[c % 2][j]);
        mma_begin();
        chunk_mma<CODEC, NT, 0>(part[c % 2], a[c % 2], b_advance(b, c * 1024), scale);
        mma_commit();
      }
      if (c == 0) continue;
      if (c < CPS) mma_wait<1>();
      else mma_wait<0>();
      const float* done = part[(c - 1) % 2];
      sum[0] = fma_rn(done[0], factors[c - 1].x, sum[0]);
      sum[1] = fma_rn(done[1], factors[c - 1].y, sum[1]);
      sum[2] = fma_rn(done[2], factors[c - 1].x, sum[2]);
      sum[3] = fma_rn(done[3], factors[c - 1].y, sum[3]);
    }
  }

  DEVICE void consume_nvfp4(int s, int stage, float* sum) {
    uint32_t words[CPS], codes[CPS][4 * WORDS];
#pragma unroll
    for (int c = 0; c < CPS; c++) words[c] = scale_words(s)[c * THREADS], load_codes(s, c, codes[c]);
    BOperand b = b_operand(activations + stage * (CPS * 1024), group_bytes());
#pragma unroll
    for (int c = 0; c < CPS; c++) {
      float part[VALUES];
      nvfp4_chunk<FEW>(codes[c], words[c], table, b_advance(b, c * 1024), part);
      fold(sum, part, stage * CPS + c, 1.0f);
    }
  }

  // One stage of the ring: decode and multiply CPS chunks, two in flight.
  DEVICE void consume(int s, int stage, float* sum, uint32_t& base) {
    if constexpr (CODEC == NVFP4) {
      consume_nvfp4(s, stage, sum);
    } else if constexpr (LOADS_FIRST) {
      consume_w2(s, stage, sum, base);
    } else {
      consume_any(s, stage, sum, base);
    }
  }
  DEVICE void consume_any(int s, int stage, float* sum, uint32_t& base) {
    const uint32_t* words = scale_words(s);
    if constexpr (has_scale_plane(CODEC)) base = load_base(s);
    uint32_t base4 = base * 0x01010101u;
    BOperand b = b_operand(activations + stage * (CPS * 1024), group_bytes());
    constexpr int BUFFERS = OVERLAP ? 2 : 1;  // chunks in flight
    uint32_t a[BUFFERS][4][4];
    float part[BUFFERS][4 * NT], weight_scale[CPS];
    uint32_t scale_word = 0, exponents = 0;
#pragma unroll
    for (int c = 0; c < CPS; c++) {
      uint32_t codes[4 * WORDS];
      load_codes(s, c, codes);
      RowScale scale = {0, 0, 0};
      if constexpr (has_scale_plane(CODEC)) {
        if (c % 2 == 0) {
          scale_word = words[c / 2 * THREADS];
#if MOET_SM == 90
          exponents = saturating_subtract(scale_word, base4) << 2;
#endif
        }
        scale.lane = scale_word;
#if MOET_SM == 90
        int quad = (lane & ~3) + 2 * (c & 1);
        scale.word0 = shuffle(exponents, quad);
        scale.word1 = shuffle(exponents, quad + 1);
#endif
      } else if constexpr (CODEC == FP8) {
        weight_scale[c] = bits_float(words[c * THREADS]);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) decode_block<CODEC>(codes, j, scale, p.masks, a[c % BUFFERS][j]);
      mma_begin();
      if (c & 1)
        chunk_mma<CODEC, NT, 1>(part[c % BUFFERS], a[c % BUFFERS], b_advance(b, c * 1024), scale);
      else
        chunk_mma<CODEC, NT, 0>(part[c % BUFFERS], a[c % BUFFERS], b_advance(b, c * 1024), scale);
      mma_commit();
      int done = c - (BUFFERS - 1);
      if (done >= 0) {
        mma_wait<BUFFERS - 1>();
        fold(sum, part[done % BUFFERS], stage * CPS + done, CODEC == FP8 ? weight_scale[done] : 1.0f);
      }
    }
    if constexpr (OVERLAP) {
      mma_wait<0>();
      fold(sum, part[(CPS - 1) % BUFFERS], stage * CPS + CPS - 1, CODEC == FP8 ? weight_scale[CPS - 1] : 1.0f);
    }
  }

  // Rows g and g + 8 get their base's power of two, or the matrix's scale; the sum joins the total.
  DEVICE void close_segment(float* total, float* sum, uint32_t base) const {
    float f0 = CODEC == NVFP4 ? tensor_scale : row_factor<CODEC>(base), f1 = f0;
#if MOET_SM == 90
    if constexpr (has_scale_plane(CODEC)) {
      f0 = row_factor<CODEC>(shuffle(base, lane & ~3));
      f1 = row_factor<CODEC>(shuffle(base, (lane & ~3) + 1));
    }
#endif
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      total[i] = fma_rn(sum[i], i % 4 < 2 ? f0 : f1, total[i]);
      sum[i] = 0.0f;
    }
  }

  DEVICE bool valid(const Entry& t) const {
    return t.slot >= 0 && t.slot < p.num_slots && t.count >= 0 && t.count <= MAX_ROWS;
  }
  DEVICE void report(const Entry& t, float* total) const {
    bool slot = t.slot < 0 || t.slot >= p.num_slots;
    if (tid == 0) atomic_or(p.error, slot ? INVALID_SLOT : INVALID_COUNT);
    trap_in_debug();
#pragma unroll
    for (int i = 0; i < VALUES; i++) total[i] = bits_float(0x7FC00000u);
  }

  DEVICE void load_for(const Entry& t, int slice) {
    if constexpr (LISTED && QUANTISE) quantise_rows(t);  // which has no slices
    else load_activations(t, slice);
    fence_shared_for_matrix_units();
    sync_threads();
  }

  DEVICE void run() {
    if constexpr (ALL_TOKENS) {
      int tokens = divide(p.num_rows, p.inverse.x_divisor);
      if constexpr (LISTED) copy_tokens(tokens);
      else load_for({0, 0, 0, tokens}, 0);
    }
    if (p.entries && !p.early) wait_for_previous_kernel();
    start();
    wait_for_previous_kernel();
    let_next_kernel_start();
    bool fine = true;
    int loaded = -1, place = 0;
    parity = 0;
#pragma unroll 1
    for (Cursor at = first; at.item < last_item; at.step(p, shared_items() ? 1 : 2)) {
      int slice = at.slice;
      if (at.entry * p.slices + slice != loaded) {
        loaded = at.entry * p.slices + slice;
        Entry t = entry(at.entry);
        fine = valid(t);
        if (t.count > MAX_ROWS) t.count = MAX_ROWS;
        if constexpr (LISTED && ALL_TOKENS) {
          find_rows(t);
        } else if constexpr (KEEPS_ROWS) {
#pragma unroll
          for (int i = 0; i < (FEW ? 1 : 2); i++) out_row[i] = row_of_value(t, i);
        }
        if constexpr (CODEC == NVFP4) {
          uint64_t at = (fine ? t.slot : 0) * p.row_stride + p.parts[EPILOGUE == SWIGLU ? warp >> 1 : 0].bases;
          tensor_scale = *reinterpret_cast<const float*>(p.weights + at);
        }
        if constexpr (!ALL_TOKENS) {
          sync_threads();  // the last item's activations are no longer read
          load_for(t, slice);
        }
      }
      // halves[0] gathers the first half, or this warpgroup's; halves[1] the second.
      float halves[2][VALUES], sum[VALUES];
#pragma unroll
      for (int i = 0; i < VALUES; i++) halves[0][i] = halves[1][i] = sum[i] = 0.0f;
      uint32_t base = 0;
      int before = slice * slice_stages + first_stage();
      int to_close = stages_per_segment * (divide(before, p.inverse.segment_stages) + 1) - before;
#pragma unroll 1
      for (int stage = first_stage(); stage < end_stage(); stage++) {
        wait_copies<STAGES - 1>();
        consume(place, stage, sum, base);
        produce(place);
        place = place + 1 == STAGES ? 0 : place + 1;
        bool half_ends = stage + 1 == p.first_half_stages || stage + 1 == slice_stages;
        if (--to_close == 0 || half_ends) {
          close_segment(halves[0], sum, base);
          if (to_close == 0) to_close = stages_per_segment;
          if (half_ends && !shared_items()) {  // the first half moves over, the second is added to it
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
              float done = halves[1][i] + halves[0][i];
              halves[1][i] = done;
              halves[0][i] = 0.0f;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < VALUES; i++) sum[i] = shared_items() ? halves[0][i] : halves[1][i];
      finish(at, fine, sum);
      parity ^= 1;
    }
    wait_copies<0>();
  }

  DEVICE int num_entries() const { return p.entries ? *p.num_entries : (p.num_rows + MAX_ROWS - 1) / MAX_ROWS; }

  DEVICE int share(int of) const { return divide(of, p.inverse.ctas); }

  // Divides the items among CTAs, in pairs (of one entry) or, where those would end later, one by one.
  DEVICE void divide_items(int entries) {
    int items = entries * p.tiles * p.slices, pairs = items / 2;
    shared = ALWAYS_SHARED || CLUSTER || p.tiles_per_segment % 2 != 0 || p.slices != 1 || 2 * share(pairs + ctas - 1) > share(items + ctas - 1);
    int unit = shared_items() ? 1 : 2, units = shared_items() ? items : pairs;
    int each = share(units), more = units - each * ctas;  // CTAs that take one more than each
    first_item = (each * cta + (cta < more ? cta : more)) * unit;
    last_item = first_item + (each + (cta < more)) * unit;
    next.seek(p, first_item + (shared_items() ? 0 : group));
    first = next;
    if constexpr (LISTED) place();
  }
  DEVICE void start() {
    if constexpr (LISTED) read_list();
    else divide_items(num_entries());
    next_stage = end_stage();
    aimed_entry = -1;
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) produce(s);
  }
  // All of it in one round, which is also that of the tokens' copies. Meanwhile the items are divided as
  // if every row were an entry.
  DEVICE void read_list() {
    static_assert(THREADS >= 3 * LIST_ROWS, "a thread reads one thing");
    int i = tid % LIST_ROWS, what = warp + 4 * group, entries = *p.num_entries;
    bool there = i < p.num_rows;
    List& to = list();
    if (what / 2 == 0) copy16(to.entries + i, p.entries + i, there);
    else if (what / 2 == 1) copy4(to.rows + i, p.pairs + i, there);
    else if (EPILOGUE == SWIGLU && what / 2 == 2 && p.pair_weight) copy4(to.weights + i, p.pair_weight + i, there);
    else if (EPILOGUE == SWIGLU && what / 2 == 2) to.weights[i] = 1.0f;
    commit_copies();
    divide_items(p.num_rows);
    // Never so: the compiler would put all that nothing ahead of the barrier needs behind it.
    if (codes + scales + bases == ~0ull) to.weights[0] = 0.0f;
    wait_copies<0>();
    if constexpr (ALL_TOKENS) fence_shared_for_matrix_units();
    sync_threads();
    if (entries != p.num_rows) divide_items(entries);
  }

  // Adds the two warpgroups' totals and stores the item's outputs.
  DEVICE void finish(const Cursor& at, bool fine, float* total) {
    Entry t = {0, 0, 0, 0};
    if (!KEEPS_ROWS || !fine) t = entry(at.entry);
    if (!fine) {
      report(t, total);
      if (t.count > MAX_ROWS) t.count = MAX_ROWS;
    }
    // Two items may be in flight, hence parity; a slot is read by the thread that it is meant for.
    const int stride = shared_items() ? 128 : 64;
    float* mine = reduction + (shared_items() ? parity * GROUPS * 512 : (2 * group + parity) * GROUPS * 256) + (tid & (stride - 1));
    if (shared_items()) {
      if (group == 1) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) mine[i * 128] = total[i];
      }
      sync_threads();
      if (group == 0) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) total[i] += mine[i * 128];
      }
      if constexpr (CLUSTER) sum_cluster(t, at, total);
      if (CLUSTER || group == 1) return;
    }
    if constexpr (EPILOGUE == SWIGLU) {
      // The up rows travel from warps 2, 3 to warps 0, 1, which hold the same rows of gate: through
      // slots that only the sender has read (shared) or that are for nothing else.
      if (warp >= 2) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) mine[i * stride] = total[i];
      }
      sync_warpgroup(group);
      if (warp < 2) {
        float up[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; i++) up[i] = mine[i * stride + (shared_items() ? 64 : 0)];
        swiglu(t, at, total, up);
      }
    } else if (KEEPS_ROWS || p.slices == 1) {
      store(t, at.in_segment, total);
    } else if constexpr (!KEEPS_ROWS) {
      store_slice(t, at, total);
    }
  }
  // Of value i of this lane.
  DEVICE int token_of(int i) const { return FEW ? lane & 3 : 8 * (i >> 2) + 2 * (lane & 3) + (i & 1); }
  DEVICE int weight_row_of(int i) const { return (lane >> 2) + 8 * (FEW ? i : i >> 1 & 1); }
  // Calls f(row of out, column, value, i) for this thread's outputs.
  template <typename F>
  DEVICE void for_outputs(const Entry& t, int first_column, int limit, const float* total, F f) const {
    if constexpr (KEEPS_ROWS) {
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        int row = out_row[FEW ? 0 : i & 1], column = first_column + weight_row_of(i);
        if (row >= 0 && column < limit) f(row, column, total[i], i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        int token = token_of(i), column = first_column + weight_row_of(i);
        if (token < t.count && column < limit) f(source_row(t, token), column, total[i], i);
      }
    }
  }

  DEVICE void swiglu(const Entry& t, const Cursor& at, const float* gate, const float* up) {
    int first_column = at.segment * p.columns;
    for_outputs(t, at.in_segment * 32 + warp * 16, p.columns, gate, [&](int row, int column, float g, int i) {
      float h = swiglu_of(g, up[i], p.swiglu_limit);
      if constexpr (LISTED) h *= list().weights[row];
      else if (p.pair_weight) h *= p.pair_weight[row];
      static_cast<uint16_t*>(p.out)[uint64_t(row) * p.ld_out + first_column + column] = to_bf16(h);
    });
  }

  DEVICE void store(const Entry& t, int tile, const float* total) {
    for_outputs(t, tile * 64 + warp * 16, p.columns, total, [&](int row, int column, float v, int) {
      uint64_t at = uint64_t(row) * p.ld_out + column;
      if constexpr (EPILOGUE == STORE_BF16)
        static_cast<uint16_t*>(p.out)[at] = to_bf16(v);
      else
        static_cast<float*>(p.out)[at] = v;
    });
  }

  // Every CTA adds all slices, in their order, of its share of the outputs.
  DEVICE void sum_cluster(const Entry& t, const Cursor& at, const float* total) {
    float* mine = reduction + (tid & 127);
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < VALUES; i++) mine[i * 128] = total[i];
    }
    sync_slices();
    if (group == 0) {
#pragma unroll 1
      for (int i = at.slice; i < VALUES; i += p.slices) {
        float part[MAX_CLUSTER];
#pragma unroll
        for (int s = 0; s < MAX_CLUSTER; s++) part[s] = s < p.slices ? load_of_rank(mine + i * 128, s) : -0.0f;
        float sum = part[0];
#pragma unroll
        for (int s = 1; s < MAX_CLUSTER; s++) sum += part[s];
        store_one(t, at.in_segment, i, sum);
      }
    }
    sync_slices();  // until here others may read
  }
  DEVICE void store_one(const Entry& t, int tile, int i, float v) const {
    int token = token_of(i), column = tile * 64 + warp * 16 + weight_row_of(i);
    if (token >= t.count || column >= p.columns) return;
    uint64_t to = uint64_t(source_row(t, token)) * p.ld_out + column;
    if constexpr (EPILOGUE == STORE_BF16)
      static_cast<uint16_t*>(p.out)[to] = to_bf16(v);
    else
      static_cast<float*>(p.out)[to] = v;
  }

  // The last slice to arrive adds all of them, in order of the slices, whoever it is. Warpgroup 0.
  DEVICE void store_slice(const Entry& t, const Cursor& at, float* total) {
    int tile = at.in_segment;
    uint64_t plane = uint64_t(p.num_rows) * p.ld_out;
    for_outputs(t, tile * 64 + warp * 16, p.columns, total, [&](int row, int column, float v, int) {
      p.partial[at.slice * plane + uint64_t(row) * p.ld_out + column] = v;
    });
    uint32_t* arrived = reinterpret_cast<uint32_t*>(reduction + parity * GROUPS * 512);
    sync_warpgroup(group);  // everybody's stores lie behind the thread that counts
    if (tid == 0) {
      uint32_t* counter = p.counters + divide(at.item, p.inverse.slices);
      *arrived = add_ordered(counter, 1);
      if (*arrived + 1 == static_cast<uint32_t>(p.slices)) *counter = 0;
    }
    sync_warpgroup(group);
    if (*arrived + 1 != static_cast<uint32_t>(p.slices)) return;
    add_slices(t, tile, plane, total);
    store(t, tile, total);
  }
  // Loads do not depend on sums, so that their latencies pass side by side. What is not there counts
  // as -0, which changes no sum.
  DEVICE void add_slices(const Entry& t, int tile, uint64_t plane, float* total) const {
    constexpr int AT_ONCE = ALWAYS_SHARED || NT > 2 ? 1 : 4 / GROUPS;
    uint32_t from[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) from[i] = 0;
    for_outputs(t, tile * 64 + warp * 16, p.columns, total, [&](int row, int column, float, int i) {
      from[i] = static_cast<uint32_t>(row) * p.ld_out + column;
    });
#pragma unroll 1
    for (int first = 0; first < p.slices; first += AT_ONCE) {
      float part[AT_ONCE][VALUES];
#pragma unroll
      for (int s = 0; s < AT_ONCE; s++) {
        bool there = first + s < p.slices;
#pragma unroll
        for (int i = 0; i < VALUES; i++) part[s][i] = there ? load_volatile(p.partial + (first + s) * plane + from[i]) : -0.0f;
      }
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) total[i] = first + s ? total[i] + part[s][i] : part[s][i];
      }
    }
  }
};
