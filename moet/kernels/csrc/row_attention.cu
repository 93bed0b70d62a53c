// Attention of a step of few rows over fp8 rows (cache.Fp8Rows), 64 heads: a CTA has a row's tile of 64 keys, half
// of the heads, which are the columns of the matrix instructions, and a part of the values; join_rows joins tiles.
// Keys are decoded ahead of the wait where nobody has to choose them. They, positions and pages are older than the
// product of queries: attention_inputs stores tokens and entries ahead of it, and all kernels of that product wait
// before they let the next one start. Chunks, whose tokens come into their rings behind attention, do not come here.
//
// A tile is summed by itself, relative to its own maximum, and tiles are joined in ascending order, with the very
// operations of triton_attention.py: a row has the same bits in both.
#include "head_rows.cuh"
#include "latent_tile.cuh"

#if MOET_SM == 90

constexpr int ROWS_THREADS = 256;  // four lanes a key
constexpr int JOIN_THREADS = 128;  // four columns each
constexpr int HEADS = 64, DIM = 512, ROPE = 64, PLAIN = DIM - ROPE;
constexpr int ROW_DATA = PLAIN + 2 * ROPE, ROW_SCALES = 8;
constexpr int HALF = HEADS / 2, QUERY_BYTES = HALF * 128, ROW_OF_LOGITS = KEYS + 4;

struct RowsArgs {
  const uint16_t* q;       // [rows, 64, 512] bf16, turned
  const float* sink;       // [64]
  const uint8_t* window;   // rings
  const uint8_t* entries;  // pages; null: none
  const int* selected;     // [rows, top_k], ascending; null: all visible entries
  const float* cos;        // [rows, 32]
  const float* sin;
  const int64_t* positions;
  const int64_t* seq_slots;
  const int64_t* page_rows;
  const int64_t* page_table;
  float* part_acc;  // [rows, tiles, 64, 512]
  float* part_sum;  // [rows, tiles, 64, 2]: the largest logit and the sum of weights
  uint8_t* codes;   // [rows, 64, 512] e4m3 in the order of matrix units
  float* scales;    // [rows, 64, 4]
  int64_t table_stride, ring_bytes, page_bytes;
  float scale;  // of logits, in powers of two
  int rows, tiles, window_tiles, parts, reach, ring, ratio, page_bits, top_k;
  int blocks, pages;  // blocks: of 64 columns, of a part; pages: of a row, at most
};

// What kernels wrote is not looked for in a cache that may be older.
#ifdef MOET_EMULATE
template <class T>
DEVICE T load_shared(const T* p) { return *p; }
DEVICE void key_product(float* d, const uint8_t* keys, const uint8_t* queries, int b, int k) {
  multiply_keys(d, keys + b * BLOCK_BYTES, queries + b * QUERY_BYTES, k, b + k > 0);
}
DEVICE void value_product(float* d, const uint8_t* values, const uint8_t* weights, int k) {
  multiply_values(d, values, weights, k, k > 0);
}
#else
// multiply_keys and multiply_values of latent_tile.cuh, whose operands' places are one addition each.
#define PRODUCT(turned)                                                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" D3 \
               "}, %16, %17, p, 1, 1, " turned ", 0;\n}\n"                                                          \
               : ACC16(d, 0)                                                                                       \
               : "l"(left), "l"(right), "r"(add))
DEVICE void key_product(float* d, const uint8_t* keys, const uint8_t* queries, int b, int k) {
  uint64_t left = b_advance(swizzled_operand(keys, 0), b * BLOCK_BYTES + 32 * k).descriptor();
  uint64_t right = b_advance(swizzled_operand(queries, 0), b * QUERY_BYTES + 32 * k).descriptor();
  int add = b + k > 0;
  PRODUCT("0");
}
DEVICE void value_product(float* d, const uint8_t* values, const uint8_t* weights, int k) {
  uint64_t left = b_advance(swizzled_operand(values, 0), 2048 * k).descriptor();
  uint64_t right = b_advance(swizzled_operand(weights, 0), 32 * k).descriptor();
  int add = k > 0;
  PRODUCT("1");
}
#undef PRODUCT
DEVICE uint4 load_shared(const uint4* p) { return __ldcg(p); }
DEVICE uint2 load_shared(const uint2* p) { return __ldcg(p); }
DEVICE int64_t load_shared(const int64_t* p) { return __ldcg(reinterpret_cast<const long long*>(p)); }
#endif

// Whether some of the entries that a row sees are chosen for it; otherwise it has all of them, in order.
DEVICE bool chooses(const RowsArgs& p, int64_t position) {
  return p.selected && static_cast<int>(position + 1) / p.ratio > p.top_k;
}
// Entries of a row.
DEVICE int visible_of(const RowsArgs& p, int64_t position) {
  if (!p.entries) return 0;
  return chooses(p, position) ? p.top_k : static_cast<int>(position + 1) / p.ratio;
}

struct RowAttention {
  const RowsArgs& p;
  int tid, lane, warp, group, row, tile, half, part;

  DEVICE RowAttention(const RowsArgs& args) : p(args) {
    tid = threadIdx.x, lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);
    warp = uniform & 3, group = uniform >> 2;
    row = blockIdx.y, tile = blockIdx.x / (2 * p.parts);
    int rest = blockIdx.x - tile * 2 * p.parts;
    half = rest / p.parts, part = rest - half * p.parts;
  }

  DEVICE static uint8_t* keys() { return dynamic_shared(); }
  DEVICE static uint8_t* queries() { return keys() + DIM / 64 * BLOCK_BYTES; }
  DEVICE static uint8_t* weights() { return queries() + DIM / 64 * QUERY_BYTES; }  // [32][64] bf16
  DEVICE static float* logits() { return reinterpret_cast<float*>(weights() + QUERY_BYTES); }
  DEVICE static int* pages() { return reinterpret_cast<int*>(logits() + HALF * ROW_OF_LOGITS); }

  DEVICE void run() {
    let_next_kernel_start();
    int64_t position = load_shared(p.positions + row), seq_slot = load_shared(p.seq_slots + row);
    int64_t page_row = load_shared(p.page_rows + row);
    bool recent = tile < p.window_tiles;
    int token = static_cast<int>(position), reached = token + 1 < p.reach ? token + 1 : p.reach;
    int first = (recent ? tile : tile - p.window_tiles) * KEYS;
    int count = (recent ? reached : visible_of(p, position)) - first;  // keys of this tile
    if (position < 0 || count <= 0) {  // makes room at once, but some CTA waits, so that this kernel ends last
      if (tile == 0) wait_for_previous_kernel();
      return;
    }
    bool real = tid >> 2 < count, chosen = !recent && chooses(p, position);
    const int64_t* table = p.page_table + page_row * p.table_stride;
    int number = first + (tid >> 2), in_page = (1 << p.page_bits) - 1;
    Key own = {};
    if (chosen) {
      int most = (token / p.ratio >> p.page_bits) + 1;
      for (int i = tid; i < most && i < p.pages; i += ROWS_THREADS) pages()[i] = static_cast<int>(load_shared(table + i));
    } else if (recent) {
      load(own, p.window + seq_slot * p.ring_bytes, p.ring, (token - reached + 1 + number) % p.ring, real);
    } else {
      int64_t page = real ? load_shared(table + (number >> p.page_bits)) : 0;
      load(own, p.entries + page * p.page_bytes, in_page + 1, number & in_page, real);
    }
    if (chosen) {
      sync_threads();
      wait_for_previous_kernel();
      int choice = real ? p.selected[int64_t(row) * p.top_k + number] : 0;
      copy_queries();
      int64_t page = pages()[choice >> p.page_bits];
      load(own, p.entries + page * p.page_bytes, in_page + 1, choice & in_page, real);
      decode(own);
    } else {
      decode(own);
      wait_for_previous_kernel();
      copy_queries();
    }
    wait_copies<0>();
    fence_shared_for_matrix_units();
    sync_threads();
    if (group == 0) weigh(count);
    sync_threads();
    sum_values();
  }

  // What a lane has of a key that is decoded: sixteen of each 64 columns.
  struct Key {
    uint4 codes[PLAIN / 64];
    uint2 scales;
  };

  DEVICE uint8_t* place_of(int piece) const {
    int at = tid >> 2;
    return keys() + at * 128 + (((2 * (tid & 3) + piece) ^ (at & 7)) * 16);
  }
  // A key that does not exist is zero. The turned columns are bf16 as they are.
  DEVICE void load(Key& key, const uint8_t* page, int places, int place, bool real) const {
    const uint8_t* data = page + place * ROW_DATA + (tid & 3) * 16;
    const uint8_t* turned = page + place * ROW_DATA + PLAIN + (tid & 3) * 32;
    if (real) {
#pragma unroll
      for (int b = 0; b < PLAIN / 64; b++) key.codes[b] = load_shared(reinterpret_cast<const uint4*>(data + b * 64));
      key.scales = load_shared(reinterpret_cast<const uint2*>(page + places * ROW_DATA + place * ROW_SCALES));
    }
    copy16(place_of(0) + PLAIN / 64 * BLOCK_BYTES, turned, real);
    copy16(place_of(1) + PLAIN / 64 * BLOCK_BYTES, turned + 16, real);
    commit_copies();
  }
  DEVICE void decode(const Key& key) const {
    uint8_t *first = place_of(0), *second = place_of(1);
#pragma unroll
    for (int b = 0; b < PLAIN / 64; b++) {
      uint32_t byte = (b < 4 ? key.scales.x >> (8 * b) : key.scales.y >> (8 * (b - 4))) & 0xFF;
      uint32_t factor = (byte + 120 < 255 ? byte + 120 : 254) << 7;  // codes lie 2^120 too low
      factor |= factor << 16;
      uint4 codes = key.codes[b];
      *reinterpret_cast<uint4*>(first + b * BLOCK_BYTES) = decode_e4m3(codes.x, codes.y, factor);
      *reinterpret_cast<uint4*>(second + b * BLOCK_BYTES) = decode_e4m3(codes.z, codes.w, factor);
    }
  }

  DEVICE void copy_queries() const {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(p.q) + uint64_t(row * HEADS + half * HALF) * (DIM * 2);
    int column = tid & 7, head = tid >> 3;
    from += head * (DIM * 2) + column * 16;
    uint8_t* to = queries() + head * 128 + ((column ^ (head & 7)) * 16);
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) copy16(to + b * QUERY_BYTES, from + b * 128, true);
    commit_copies();
  }

  DEVICE int64_t sums_at() const { return (int64_t(row) * p.tiles + tile) * HEADS + half * HALF; }

  // A tile's logits, turned round by way of shared memory; then four lanes a head, in the order of HeadRows::weigh.
  DEVICE void weigh(int count) const {
    float found[16];
    mma_begin();
#pragma unroll
    for (int b = 0; b < DIM / 64; b++)
#pragma unroll
      for (int k = 0; k < 4; k++) key_product(found, keys(), queries(), b, k);
    mma_commit();
    mma_wait<0>();
    results_are_here<16>(found);
    float* to = logits() + 2 * (lane & 3) * ROW_OF_LOGITS + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 16; i++) to[(i / 4 * 8 + (i & 1)) * ROW_OF_LOGITS + 8 * (i >> 1 & 1)] = found[i];
    sync_warpgroup(0);
    int head = warp * 8 + (lane >> 2), t = lane & 3;
    const float* from = logits() + head * ROW_OF_LOGITS + 2 * t;
    float v[16], highest = bits_float(0xFF800000u), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int key = i / 2 * 8 + (i & 1);
      v[i] = key + 2 * t < count ? mul_rn(from[key], p.scale) : bits_float(0xFF800000u);
      highest = larger(highest, v[i]);
    }
    highest = larger(highest, shuffle_xor(highest, 2));
    highest = larger(highest, shuffle_xor(highest, 1));
    uint8_t* out = weights() + head * 128 + t * 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      float a = exp2_approx(add_rn(v[2 * n], -highest)), b = exp2_approx(add_rn(v[2 * n + 1], -highest));
      sum = n ? add_rn(add_rn(sum, a), b) : add_rn(a, b);
      uint32_t word = to_bf16(a) | static_cast<uint32_t>(to_bf16(b)) << 16;
      *reinterpret_cast<uint32_t*>(out + ((n ^ (head & 7)) * 16)) = word;
    }
    sum = add_rn(sum, shuffle_xor(sum, 2));
    sum = add_rn(sum, shuffle_xor(sum, 1));
    if (part == 0 && t == 0) *reinterpret_cast<float2*>(p.part_sum + (sums_at() + head) * 2) = {highest, sum};
    fence_shared_for_matrix_units();
  }

  // Of this part's blocks of 64 columns a warpgroup has every other.
  DEVICE void sum_values() const {
    float* to = p.part_acc + (sums_at() + 2 * (lane & 3)) * DIM + warp * 16 + (lane >> 2);
#pragma unroll 1
    for (int b = part * p.blocks + group; b < (part + 1) * p.blocks; b += 2) {
      float sums[16];
      mma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) value_product(sums, keys() + b * BLOCK_BYTES, weights(), k);
      mma_commit();
      mma_wait<0>();
      results_are_here<16>(sums);
#pragma unroll
      for (int i = 0; i < 16; i++) to[(i / 4 * 8 + (i & 1)) * DIM + b * 64 + 8 * (i >> 1 & 1)] = sums[i];
    }
  }
};

KERNEL(ROWS_THREADS, 2) attend_rows(GRID_CONSTANT RowsArgs args) { RowAttention(args).run(); }
LAUNCHABLE(attend_rows, RowsArgs, ROWS_THREADS)

// A head of a row to a CTA: its tiles, all of which are asked for before any is used.
struct RowJoin {
  const RowsArgs& p;
  int column, row, head;
  float sink, cos[2], sin[2];

  DEVICE RowJoin(const RowsArgs& args) : p(args) {
    row = blockIdx.x / HEADS, head = blockIdx.x % HEADS, column = threadIdx.x * 4;
    cos[0] = cos[1] = 1.0f, sin[0] = sin[1] = 0.0f;
  }

  DEVICE static float* sums() { return reinterpret_cast<float*>(dynamic_shared()); }
  DEVICE float* parts() const { return sums() + 2 * ((p.tiles + 1) / 2 * 2) + column; }

  DEVICE void run() {
    let_next_kernel_start();
    int64_t position = load_shared(p.positions + row);
    sink = mul_rn(p.sink[head], 1.4426950408889634f);
    if (column >= PLAIN) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int at = row * (ROPE / 2) + (column - PLAIN) / 2 + i;
        cos[i] = p.cos[at], sin[i] = p.sin[at];
      }
    }
    int last = position < 0 ? 0 : p.window_tiles + (visible_of(p, position) + KEYS - 1) / KEYS;
    // Of the window's tiles those that have keys; one without adds nothing, exactly.
    int recent = position < p.window_tiles * KEYS ? static_cast<int>(position) / KEYS + 1 : p.window_tiles;
    wait_for_previous_kernel();
    gather(last, recent);
    sync_threads();
    join(last);
  }

  DEVICE void gather(int last, int recent) const {
    int64_t own = int64_t(row) * p.tiles * HEADS + head;
    const float* from = p.part_acc + own * DIM + column;
#pragma unroll 4
    for (int i = 0; i < last; i++)
      copy16(parts() + i * DIM, from + i * (HEADS * DIM), i >= p.window_tiles || i < recent);
    commit_copies();
    int tile = threadIdx.x;
    if (tile < last) {
      float2 found = {bits_float(0xFF800000u), 0.0f};
      if (tile >= p.window_tiles || tile < recent)
        found = *reinterpret_cast<const float2*>(p.part_sum + (own + tile * HEADS) * 2);
      sums()[2 * tile] = found.x, sums()[2 * tile + 1] = found.y;
    }
    wait_copies<0>();
  }

  DEVICE void join(int last) const {
    float top = bits_float(0xFF800000u), total = 0.0f, v[4] = {};
#pragma unroll 4
    for (int i = 0; i < last; i++) {
      float part_top = sums()[2 * i], higher = larger(top, part_top);
      float old = exp2_approx(add_rn(top, -higher)), fresh = exp2_approx(add_rn(part_top, -higher));
      total = fma_rn(fresh, sums()[2 * i + 1], mul_rn(old, total));
      top = higher;
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = fma_rn(fresh, parts()[i * DIM + j], mul_rn(old, v[j]));
    }
    float shift = larger(top, sink), share = exp2_approx(add_rn(top, -shift));
    float factor = div_full(share, fma_rn(total, share, exp2_approx(add_rn(sink, -shift))));
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = round_to_bf16(mul_rn(v[j], factor));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float a = v[2 * i], b = v[2 * i + 1];
      v[2 * i] = round_to_bf16(fma_rn(a, cos[i], mul_rn(b, sin[i])));
      v[2 * i + 1] = round_to_bf16(fma_rn(b, cos[i], mul_rn(a, -sin[i])));
    }
    // A warp has the 128 columns of a scale: the smallest power of two that fits 448 to them.
    uint32_t most = 0, least = float_bits(1e-4f);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t size = float_bits(v[j]) & 0x7FFFFFFF;
      most = size > most ? size : most;
    }
    most = warp_max(most);
    if (most < least) most = least;
    uint32_t byte = (most >> 23) - 8 + ((most & 0x7FFFFF) > 0x600000);
    float fit = bits_float((254 - byte) << 23);
    uint32_t low = to_e4m3x2(mul_rn(v[0], fit), mul_rn(v[1], fit)), high = to_e4m3x2(mul_rn(v[2], fit), mul_rn(v[3], fit));
    int64_t at = int64_t(blockIdx.x) * DIM;
    if (column % 128 == 0) p.scales[(at + column) / 128] = bits_float(byte << 23);
    int word = column / 4, place = (column & -32) | (word & 1) << 4 | (word >> 1 & 3) << 2;  // layout.to_mma_order
    *reinterpret_cast<uint32_t*>(p.codes + at + place) = low | high << 16;
  }
};

KERNEL(JOIN_THREADS, 2) join_rows(GRID_CONSTANT RowsArgs args) { RowJoin(args).run(); }
LAUNCHABLE(join_rows, RowsArgs, JOIN_THREADS)
#endif
