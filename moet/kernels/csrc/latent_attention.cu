// Latent attention of many rows over chosen positions: up to 64 heads share one key of 512 values and 64
// that are turned, as mla_cache.Nvfp4LatentRows or Fp8LatentRows store it. A CTA takes rows in turn: one
// warpgroup decodes keys, 64 at a time, to bf16 in shared memory; two others multiply, each with all keys
// and half of the values.
//
// A tile of keys is summed by itself, relative to its own maximum, and tiles are joined in ascending
// order, with the very operations of triton_mla_attention.py: a row has the same bits in both. Keys are
// decoded 2^8 too small, for the sake of their range; a power of two changes no digit.
#include "latent_tile.cuh"

#if MOET_SM == 90  // sm_120a has no room for a tile of keys

constexpr int LATENT_THREADS = 384;
constexpr int DECODERS = 128;
constexpr int KEYS = 64, LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int BLOCK_BYTES = KEYS * 128, TILE_BYTES = WIDTH / 64 * BLOCK_BYTES, TILES_HELD = 2;
constexpr int MAX_CHOSEN = 2048;  // of a row
constexpr float SMALL = 256.0f;  // how much smaller keys are in shared memory

struct LatentArgs {
  const uint16_t* q;     // [rows, heads, 576] bf16
  const uint8_t* pages;
  const int* selected;   // [rows, top_k], ascending
  const int64_t* positions;
  const int64_t* page_rows;
  const int64_t* page_table;
  uint16_t* out;  // [rows, heads, 512] bf16
  int64_t table_stride, page_bytes;
  float scale;  // of logits, in powers of two
  int rows, heads, per_page, top_k;
};

// Two e4m3 codes in the upper bytes of halves, 2^120 too low as bf16, times the factor.
DEVICE uint32_t decode_two(uint32_t codes, uint32_t factor) {
  return multiply_bf16x2((codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u), factor);
}
DEVICE uint4 decode_e4m3(uint32_t low, uint32_t high, uint32_t factor) {
  return {decode_two(permute(low, 0, 0x1404), factor), decode_two(permute(low, 0, 0x3424), factor),
          decode_two(permute(high, 0, 0x1404), factor), decode_two(permute(high, 0, 0x3424), factor)};
}
// Eight e2m1 codes, whose fields are 2^126 too low as bf16: those four nibbles apart at a time.
DEVICE uint4 decode_e2m1(uint32_t w, uint32_t factor) {
  uint32_t a = multiply_bf16x2((w << 12 & 0x80008000u) | (w << 6 & 0x01C001C0u), factor);
  uint32_t b = multiply_bf16x2((w << 8 & 0x80008000u) | (w << 2 & 0x01C001C0u), factor);
  uint32_t c = multiply_bf16x2((w << 4 & 0x80008000u) | (w >> 2 & 0x01C001C0u), factor);
  uint32_t d = multiply_bf16x2((w & 0x80008000u) | (w >> 6 & 0x01C001C0u), factor);
  return {permute(a, b, 0x5410), permute(c, d, 0x5410), permute(a, b, 0x7632), permute(c, d, 0x7632)};
}
DEVICE uint32_t twice(uint32_t half) { return half | half << 16; }
DEVICE uint32_t byte_of(uint2 bytes, int i) { return (i < 4 ? bytes.x >> (8 * i) : bytes.y >> (8 * (i - 4))) & 0xFF; }

// What a lane has of a key: sixteen of each 64 columns, two pieces of eight in shared memory.
struct Nvfp4Key {
  static constexpr int BYTES = LATENT / 2 + ROPE + LATENT / 16;
  uint2 codes[LATENT / 64];
  uint4 turned;
  uint2 scales;  // of its columns, by block

  DEVICE void load_scales(const uint8_t* row, int part) {
    scales = *reinterpret_cast<const uint2*>(row + LATENT / 2 + ROPE + part * 8);
  }
  DEVICE void load(const uint8_t* row, int part, int b) {
    codes[b] = *reinterpret_cast<const uint2*>(row + b * 32 + part * 8);
  }
  DEVICE void load_turned(const uint8_t* row, int part) {
    turned = *reinterpret_cast<const uint4*>(row + LATENT / 2 + part * 16);
  }
  DEVICE static uint32_t factor(uint2 scales, int b) {  // 2^118 times the scale, in two steps of 2^119
    uint32_t code = twice(byte_of(scales, b) << 4);
    return multiply_bf16x2(multiply_bf16x2(code, twice(246 << 7)), twice(246 << 7));
  }
  DEVICE uint4 first(uint2 scales, int b) const { return decode_e2m1(codes[b].x, factor(scales, b)); }
  DEVICE uint4 second(uint2 scales, int b) const { return decode_e2m1(codes[b].y, factor(scales, b)); }
  DEVICE uint4 first_turned() const { return decode_e4m3(turned.x, turned.y, twice((127 + 112) << 7)); }
  DEVICE uint4 second_turned() const { return decode_e4m3(turned.z, turned.w, twice((127 + 112) << 7)); }
};

struct Fp8Key {
  static constexpr int BYTES = LATENT + LATENT / 128 * 4 + ROPE * 2;
  uint4 codes[LATENT / 64];
  uint4 turned[2];
  uint4 scales;  // fp32 powers of two, of 128 columns each

  DEVICE void load_scales(const uint8_t* row, int) { scales = *reinterpret_cast<const uint4*>(row + LATENT); }
  DEVICE void load(const uint8_t* row, int part, int b) {
    codes[b] = *reinterpret_cast<const uint4*>(row + b * 64 + part * 16);
  }
  DEVICE void load_turned(const uint8_t* row, int part) {
    const uint4* from = reinterpret_cast<const uint4*>(row + LATENT + LATENT / 128 * 4 + part * 32);
    turned[0] = from[0], turned[1] = from[1];
  }
  DEVICE static uint32_t factor(uint4 scales, int b) {
    uint32_t bits = b < 2 ? scales.x : b < 4 ? scales.y : b < 6 ? scales.z : scales.w;
    uint32_t exponent = (bits >> 23) + 112;
    return twice((exponent < 255 ? exponent : 254) << 7);
  }
  DEVICE uint4 first(uint4 scales, int b) const { return decode_e4m3(codes[b].x, codes[b].y, factor(scales, b)); }
  DEVICE uint4 second(uint4 scales, int b) const { return decode_e4m3(codes[b].z, codes[b].w, factor(scales, b)); }
  DEVICE static uint4 smaller(uint4 v) {
    uint32_t by = twice((127 - 8) << 7);
    return {multiply_bf16x2(v.x, by), multiply_bf16x2(v.y, by), multiply_bf16x2(v.z, by), multiply_bf16x2(v.w, by)};
  }
  DEVICE uint4 first_turned() const { return smaller(turned[0]); }
  DEVICE uint4 second_turned() const { return smaller(turned[1]); }
};

// Which positions a row attends to: the first `visible` that were chosen for it.
struct LatentSight {
  int token, page_row, visible;

  DEVICE int tiles() const { return (visible + KEYS - 1) / KEYS; }
};

// The keys of a CTA's rows, tile by tile, and the queries of HEADS heads, real or not.
template <class Key, int HEADS, bool BOTH_AHEAD>
struct LatentKeys {
  static constexpr int QUERY_BYTES = HEADS * 128;  // of 64 columns
  const LatentArgs& p;
  int tid, lane, warp, group;

  DEVICE LatentKeys(const LatentArgs& args) : p(args) {
    tid = threadIdx.x, lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);
    warp = uniform & 3, group = uniform >> 2;
  }

  // Barriers: a tile is here, a tile's two readers are done; the same of the queries.
  DEVICE static uint64_t* full(int s) { return reinterpret_cast<uint64_t*>(dynamic_shared()) + s; }
  DEVICE static uint64_t* empty(int s) { return full(TILES_HELD + s); }
  DEVICE static uint64_t* queries_full() { return full(2 * TILES_HELD); }
  DEVICE static uint64_t* queries_empty() { return full(2 * TILES_HELD + 1); }
  DEVICE static uint8_t* queries() { return dynamic_shared() + 1024; }
  // Only of few heads: a tile's weights are here.
  DEVICE static uint64_t* weighed(int s) { return full(2 * TILES_HELD + 2 + s); }
  DEVICE static uint8_t* tile(int s) { return queries() + WIDTH / 64 * QUERY_BYTES + s * TILE_BYTES; }
  DEVICE static int* chosen() { return reinterpret_cast<int*>(tile(TILES_HELD)); }

  // A fill row counts as one with a single position.
  DEVICE LatentSight sight_of(int64_t position, int64_t page_row) const {
    int token = position < 0 ? 0 : static_cast<int>(position);
    return {token, static_cast<int>(page_row), token + 1 < p.top_k ? token + 1 : p.top_k};
  }

  // The last rows, which have most to attend to, come first, so that CTAs end together.
  DEVICE int first_row() const { return p.rows - 1 - static_cast<int>(blockIdx.x); }

  DEVICE void begin() {
    if (tid == 0) {
      for (int s = 0; s < TILES_HELD; s++) {
        barrier_init(full(s), DECODERS), barrier_init(empty(s), 8), barrier_init(weighed(s), 128);
      }
      barrier_init(queries_full(), DECODERS), barrier_init(queries_empty(), 8);
      barriers_are_ready();
    }
    sync_threads();
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  DEVICE void leave(uint64_t* barrier) const {
    sync_warp();
    if (lane == 0) barrier_arrive(barrier);
  }

  // ---- the warpgroup that decodes: four lanes a key, and two keys a lane ----

  // Where a key lies; one that does not exist is the row itself, and counts nothing.
  DEVICE const uint8_t* find(const LatentSight& s, int key, int choice) const {
    int number = key < s.visible && choice >= 0 ? choice : s.token;
    int64_t page = p.page_table[s.page_row * p.table_stride + number / p.per_page];
    return p.pages + page * p.page_bytes + int64_t(number % p.per_page) * Key::BYTES;
  }

  // Decodes a key into row `at` of a tile; piece by piece its registers take the next key.
  DEVICE void decode_key(Key& raw, const uint8_t* next, uint8_t* to, int at) const {
    int part = lane & 3;
    uint8_t* first = to + at * 128 + (((2 * part) ^ (at & 7)) * 16);
    uint8_t* second = to + at * 128 + (((2 * part + 1) ^ (at & 7)) * 16);
    auto scales = raw.scales;
    raw.load_scales(next, part);
#pragma unroll
    for (int b = 0; b < LATENT / 64; b++) {
      uint4 low = raw.first(scales, b), high = raw.second(scales, b);
      raw.load(next, part, b);
      *reinterpret_cast<uint4*>(first + b * BLOCK_BYTES) = low;
      *reinterpret_cast<uint4*>(second + b * BLOCK_BYTES) = high;
    }
    uint4 low = raw.first_turned(), high = raw.second_turned();
    raw.load_turned(next, part);
    *reinterpret_cast<uint4*>(first + LATENT / 64 * BLOCK_BYTES) = low;
    *reinterpret_cast<uint4*>(second + LATENT / 64 * BLOCK_BYTES) = high;
  }
  DEVICE void load_key(Key& raw, const uint8_t* from) const {
    int part = lane & 3;
    raw.load_scales(from, part);
#pragma unroll
    for (int b = 0; b < LATENT / 64; b++) raw.load(from, part, b);
    raw.load_turned(from, part);
  }

  DEVICE void copy_queries(int row) const {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(p.q) + uint64_t(row) * p.heads * (WIDTH * 2);
    int mine = tid - 2 * 128, column = mine & 7;
#pragma unroll 1
    for (int head = mine >> 3; head < HEADS; head += DECODERS / 8) {
      bool real = head < p.heads;
      const uint8_t* own = from + (real ? head : 0) * (WIDTH * 2) + column * 16;
      uint8_t* to = queries() + head * 128 + ((column ^ (head & 7)) * 16);
#pragma unroll
      for (int b = 0; b < WIDTH / 64; b++) copy16(to + b * QUERY_BYTES, own + b * 128, real);
    }
    commit_copies();
  }
  // What this warp's keys are, of all tiles: it alone reads them.
  DEVICE void copy_chosen(int row) const {
    for (int i = lane; i < p.top_k / 16; i += 32) {
      int key = i / 4 * KEYS + warp * 16 + i % 4 * 4;
      copy16(chosen() + key, p.selected + int64_t(row) * p.top_k + key, true);
    }
    commit_copies();
  }
  DEVICE void show_queries() const {
    wait_copies<0>();
    fence_shared_for_matrix_units();
    barrier_arrive(queries_full());
    sync_warp();
  }

  DEVICE void decode_all() const {
    int stage = 0, turn = 1, query_turn = 1;  // a new barrier's phase before the first counts as ended
    int row = first_row(), at = warp * 16 + (lane >> 2);
    if (row < 0) return;
    LatentSight s = sight_of(p.positions[row], p.page_rows[row]);
    const int* choices = p.selected + int64_t(row) * p.top_k;
    // Keys of the tile that comes; where registers hold both, they are on their way for as long as one is multiplied.
    const uint8_t* place = find(s, at + 8, choices[at + 8]);
    Key raw, other;
    load_key(raw, find(s, at, choices[at]));
    if constexpr (BOTH_AHEAD) load_key(other, place);
    while (row >= 0) {
      int after = row >= static_cast<int>(gridDim.x) ? row - static_cast<int>(gridDim.x) : row;
      int64_t position = p.positions[after], page_row = p.page_rows[after];
      choices = p.selected + int64_t(after) * p.top_k;
      int next_first = choices[at], next_second = choices[at + 8];
      barrier_wait(queries_empty(), query_turn);
      query_turn ^= 1;
      copy_queries(row);
      copy_chosen(row);
      LatentSight next = sight_of(position, page_row);
      int tiles = s.tiles();
      show_queries();
#pragma unroll 1
      for (int i = 0; i < tiles; i++) {
        bool last = i + 1 == tiles;
        LatentSight of = last ? next : s;
        int ahead = last ? at : (i + 1) * KEYS + at;
        const uint8_t* first = find(of, ahead, last ? next_first : chosen()[ahead]);
        const uint8_t* second = find(of, ahead + 8, last ? next_second : chosen()[ahead + 8]);
        barrier_wait(empty(stage), turn);
        if constexpr (BOTH_AHEAD) {
          decode_key(raw, first, tile(stage), at);
          decode_key(other, second, tile(stage), at + 8);
        } else {
          decode_key(raw, place, tile(stage), at);
          decode_key(raw, first, tile(stage), at + 8);
          place = second;
        }
        fence_shared_for_matrix_units();
        barrier_arrive(full(stage));
        if (++stage == TILES_HELD) stage = 0, turn ^= 1;
      }
      s = next;
      row -= gridDim.x;
    }
  }

};

// Up to 64 heads are the rows of the matrix instructions: g and g + 8 of a warp's sixteen.
template <class Key, bool BOTH_AHEAD>
struct ManyHeads : LatentKeys<Key, 64, BOTH_AHEAD> {
  using Base = LatentKeys<Key, 64, BOTH_AHEAD>;
  using Base::p, Base::lane, Base::warp, Base::group, Base::leave, Base::full, Base::empty, Base::tile;
  using Base::queries, Base::queries_full, Base::queries_empty;
  float acc[4][32], top[2], total[2];

  DEVICE ManyHeads(const LatentArgs& args) : Base(args) {}

  DEVICE void run() {
    this->begin();
    if (group == 2) {
      give_registers<88>();
      this->decode_all();
    } else {
      take_registers<208>();
      attend_all();
    }
  }

  // Weights of a tile's keys as the A operand, [key / 16][4]; the first `count` keys exist.
  DEVICE void weigh(float* logits, int count, uint32_t (*weights)[4], float* part_top, float* part_total) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float highest = bits_float(0xFF800000u);
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& v = logits[4 * n + 2 * r + i];
          v = 8 * n + 2 * (lane & 3) + i < count ? mul_rn(v, p.scale) : bits_float(0xFF800000u);
          highest = larger(highest, v);
        }
      highest = larger(highest, shuffle_xor(highest, 2));
      highest = larger(highest, shuffle_xor(highest, 1));
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        float a = exp2_approx(add_rn(logits[4 * n + 2 * r], -highest));
        float b = exp2_approx(add_rn(logits[4 * n + 2 * r + 1], -highest));
        sum = n ? add_rn(add_rn(sum, a), b) : add_rn(a, b);
        weights[n / 2][n % 2 * 2 + r] = to_bf16(a) | static_cast<uint32_t>(to_bf16(b)) << 16;
      }
      sum = add_rn(sum, shuffle_xor(sum, 2));
      part_total[r] = add_rn(sum, shuffle_xor(sum, 1));
      part_top[r] = highest;
    }
  }

  DEVICE void attend_tile(const uint8_t* keys, int count, bool last, uint64_t* done) {
    float part[32], part_top[2], part_total[2], old[2], fresh[2];
    uint32_t weights[4][4];
    mma_begin();
#pragma unroll
    for (int b = 0; b < WIDTH / 64; b++)
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_rows(part, queries() + b * BLOCK_BYTES, keys + b * BLOCK_BYTES, k, b + k > 0);
    mma_commit();
    mma_wait<0>();
    results_are_here<32>(part);
    if (last) leave(queries_empty());
    weigh(part, count, weights, part_top, part_total);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = larger(top[r], part_top[r]);
      old[r] = exp2_approx(add_rn(top[r], -higher)), fresh[r] = exp2_approx(add_rn(part_top[r], -higher));
      total[r] = fma_rn(fresh[r], part_total[r], mul_rn(old[r], total[r]));
      top[r] = higher;
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
      mma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_columns(part, weights[k], keys + (group * 4 + b) * BLOCK_BYTES, k, k > 0);
      mma_commit();
      mma_wait<0>();
      results_are_here<32>(part);
      if (b == 3) leave(done);
#pragma unroll
      for (int i = 0; i < 32; i++)
        acc[b][i] = fma_rn(fresh[i >> 1 & 1], part[i], mul_rn(old[i >> 1 & 1], acc[b][i]));
    }
  }

  DEVICE void attend_all() {
    int stage = 0, parity = 0, query_parity = 0;
    for (int row = this->first_row(); row >= 0; row -= gridDim.x) {
      LatentSight s = this->sight_of(p.positions[row], 0);
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 32; i++) acc[b][i] = 0.0f;
      top[0] = top[1] = bits_float(0xFF800000u), total[0] = total[1] = 0.0f;
      barrier_wait(queries_full(), query_parity);
      query_parity ^= 1;
      int tiles = s.tiles();
#pragma unroll 1
      for (int i = 0; i < tiles; i++) {
        barrier_wait(full(stage), parity);
        attend_tile(tile(stage), s.visible - i * KEYS, i + 1 == tiles, empty(stage));
        if (++stage == TILES_HELD) stage = 0, parity ^= 1;
      }
      finish(row);
    }
  }

  DEVICE void finish(int row) {
    float factor[2] = {div_full(1.0f, total[0]) * SMALL, div_full(1.0f, total[1]) * SMALL};
#pragma unroll
    for (int b = 0; b < 4; b++) {
#pragma unroll
      for (int i = 0; i < 32; i++) acc[b][i] = mul_rn(acc[b][i], factor[i >> 1 & 1]);
      store(row, b, acc[b]);
    }
  }
  // 64 columns of a warp's heads: four lanes exchange pairs, so that each stores eight columns at once.
  DEVICE void store(int row, int b, const float* v) const {
    int t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32_t w[4], got[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float* pair = v + 4 * (4 * half + n) + 2 * r;
          w[n] = to_bf16(pair[0]) | static_cast<uint32_t>(to_bf16(pair[1])) << 16;
        }
        // Lane t ends with columns 8 t .. 8 t + 7: a word from each of the four.
#pragma unroll
        for (int step = 0; step < 4; step++) {
          int want = t ^ step;
          uint32_t mine = want == 0 ? w[0] : want == 1 ? w[1] : want == 2 ? w[2] : w[3];
          uint32_t theirs = step ? shuffle(mine, lane ^ step) : mine;
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (want == j) got[j] = theirs;
        }
        int head = warp * 16 + (lane >> 2) + 8 * r;
        uint16_t* to = p.out + (uint64_t(row) * p.heads + head) * LATENT + (group * 4 + b) * 64 + half * 32 + t * 8;
        if (head < p.heads) *reinterpret_cast<uint4*>(to) = {got[0], got[1], got[2], got[3]};
      }
  }
};

// Up to 32 heads, of a rank, are the columns of the matrix instructions, keys and then values their rows: none
// is empty. A warpgroup weighs every other tile, by way of shared memory in the order of ManyHeads, whose bits
// these are; both multiply each tile with half of the values.
constexpr int FEW_HEADS = 32, ROW_OF_LOGITS = KEYS + 4;

template <class Key, bool BOTH_AHEAD>
struct FewHeads : LatentKeys<Key, FEW_HEADS, BOTH_AHEAD> {
  using Base = LatentKeys<Key, FEW_HEADS, BOTH_AHEAD>;
  using Base::p, Base::lane, Base::warp, Base::group, Base::leave, Base::full, Base::empty, Base::tile;
  using Base::queries, Base::queries_full, Base::queries_empty, Base::weighed;
  float acc[4][16], top[8], total[8];  // of heads 8 (i / 2) + 2 (lane & 3) + i % 2

  DEVICE FewHeads(const LatentArgs& args) : Base(args) {}

  // Behind what was chosen: weights of a tile, [32][64] bf16; logits of a warpgroup's; maxima and sums.
  DEVICE uint8_t* weights(int s) const {
    return reinterpret_cast<uint8_t*>(Base::chosen() + MAX_CHOSEN) + s * FEW_HEADS * 128;
  }
  DEVICE float* logits() const {
    return reinterpret_cast<float*>(weights(TILES_HELD)) + group * FEW_HEADS * ROW_OF_LOGITS;
  }
  DEVICE float* sums(int s) const {
    return reinterpret_cast<float*>(weights(TILES_HELD)) + 2 * FEW_HEADS * ROW_OF_LOGITS + s * 2 * FEW_HEADS;
  }

  DEVICE void run() {
    this->begin();
    if (group == 2) {
      give_registers<112>();
      this->decode_all();
    } else {
      take_registers<200>();
      attend_all();
    }
  }

  // A tile's logits, turned round; then as ManyHeads::weigh: four lanes a head.
  DEVICE void weigh(int s, int count, bool last) {
    float part[16];
    mma_begin();
#pragma unroll
    for (int b = 0; b < WIDTH / 64; b++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_keys(part, tile(s) + b * BLOCK_BYTES, queries() + b * Base::QUERY_BYTES, k, b + k > 0);
    mma_commit();
    mma_wait<0>();
    results_are_here<16>(part);
    if (last) leave(queries_empty());
    float* to = logits() + 2 * (lane & 3) * ROW_OF_LOGITS + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 16; i++) to[(i / 4 * 8 + (i & 1)) * ROW_OF_LOGITS + 8 * (i >> 1 & 1)] = part[i];
    sync_warpgroup(group);
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
    uint8_t* out = weights(s) + head * 128 + t * 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      float a = exp2_approx(add_rn(v[2 * n], -highest)), b = exp2_approx(add_rn(v[2 * n + 1], -highest));
      sum = n ? add_rn(add_rn(sum, a), b) : add_rn(a, b);
      uint32_t word = to_bf16(a) | static_cast<uint32_t>(to_bf16(b)) << 16;
      *reinterpret_cast<uint32_t*>(out + ((n ^ (head & 7)) * 16)) = word;
    }
    sum = add_rn(sum, shuffle_xor(sum, 2));
    sum = add_rn(sum, shuffle_xor(sum, 1));
    if (t == 0) sums(s)[head] = highest, sums(s)[FEW_HEADS + head] = sum;
    fence_shared_for_matrix_units();
    barrier_arrive(weighed(s));
  }

  DEVICE void join(int s) {
    float part[16], old[8], fresh[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int head = i / 2 * 8 + 2 * (lane & 3) + (i & 1);
      float part_top = sums(s)[head], part_total = sums(s)[FEW_HEADS + head];
      float higher = larger(top[i], part_top);
      old[i] = exp2_approx(add_rn(top[i], -higher)), fresh[i] = exp2_approx(add_rn(part_top, -higher));
      total[i] = fma_rn(fresh[i], part_total, mul_rn(old[i], total[i]));
      top[i] = higher;
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
      mma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_values(part, tile(s) + (group * 4 + b) * BLOCK_BYTES, weights(s), k, k > 0);
      mma_commit();
      mma_wait<0>();
      results_are_here<16>(part);
      if (b == 3) leave(empty(s));
#pragma unroll
      for (int i = 0; i < 16; i++) {
        int h = i / 4 * 2 + (i & 1);
        acc[b][i] = fma_rn(fresh[h], part[i], mul_rn(old[h], acc[b][i]));
      }
    }
  }

  DEVICE void attend_all() {
    int done = 0, query_parity = 0;  // tiles so far
    for (int row = this->first_row(); row >= 0; row -= gridDim.x) {
      LatentSight s = this->sight_of(p.positions[row], 0);
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 16; i++) acc[b][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) top[i] = bits_float(0xFF800000u), total[i] = 0.0f;
      barrier_wait(queries_full(), query_parity);
      query_parity ^= 1;
      int tiles = s.tiles();
      if (group >= tiles) leave(queries_empty());  // has none to weigh
#pragma unroll 1
      for (int i = 0; i < tiles; i += 2) {
        int own = i + group;
        if (own < tiles) {
          int stage = (done + own) % TILES_HELD;
          barrier_wait(full(stage), (done + own) / TILES_HELD & 1);
          weigh(stage, s.visible - own * KEYS, own + 2 >= tiles);
        }
#pragma unroll 1
        for (int j = i; j < i + 2 && j < tiles; j++) {
          int stage = (done + j) % TILES_HELD;
          barrier_wait(weighed(stage), (done + j) / TILES_HELD & 1);
          join(stage);
        }
      }
      done += tiles;
      finish(row);
    }
  }

  // Lanes of neighbouring columns exchange: each stores two columns of one head.
  DEVICE void finish(int row) const {
    int odd = lane >> 2 & 1;
#pragma unroll
    for (int h = 0; h < 8; h += 2) {
      float even_factor = div_full(1.0f, total[h]) * SMALL, odd_factor = div_full(1.0f, total[h + 1]) * SMALL;
      int head = h * 4 + 2 * (lane & 3) + odd;
      uint16_t* to = p.out + (uint64_t(row) * p.heads + head) * LATENT + group * 256 + warp * 16 + (lane >> 3) * 2;
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          uint32_t first = to_bf16(mul_rn(acc[b][2 * h + 2 * r], even_factor));
          uint32_t second = to_bf16(mul_rn(acc[b][2 * h + 2 * r + 1], odd_factor));
          uint32_t theirs = shuffle(odd ? first : second, lane ^ 4);
          uint32_t word = odd ? theirs | second << 16 : first | theirs << 16;
          if (head < p.heads) *reinterpret_cast<uint32_t*>(to + b * 64 + r * 8) = word;
        }
    }
  }
};

KERNEL(LATENT_THREADS, 1) attend_chosen_nvfp4(GRID_CONSTANT LatentArgs args) { ManyHeads<Nvfp4Key, false>(args).run(); }
LAUNCHABLE(attend_chosen_nvfp4, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_chosen_nvfp4_ahead(GRID_CONSTANT LatentArgs args) { ManyHeads<Nvfp4Key, true>(args).run(); }
LAUNCHABLE(attend_chosen_nvfp4_ahead, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_chosen_fp8(GRID_CONSTANT LatentArgs args) { ManyHeads<Fp8Key, false>(args).run(); }
LAUNCHABLE(attend_chosen_fp8, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_few_nvfp4(GRID_CONSTANT LatentArgs args) { FewHeads<Nvfp4Key, false>(args).run(); }
LAUNCHABLE(attend_few_nvfp4, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_few_nvfp4_ahead(GRID_CONSTANT LatentArgs args) { FewHeads<Nvfp4Key, true>(args).run(); }
LAUNCHABLE(attend_few_nvfp4_ahead, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_few_fp8(GRID_CONSTANT LatentArgs args) { FewHeads<Fp8Key, false>(args).run(); }
LAUNCHABLE(attend_few_fp8, LatentArgs, LATENT_THREADS)
#endif
