// The keys of latent attention: what a row attends to, where its keys lie and how they are stored
// (mla_cache.Nvfp4LatentRows, Fp8LatentRows), and the warpgroup that decodes them, 64 at a time, to bf16 in
// shared memory. They are decoded 2^8 too small, for the sake of their range; a power of two changes no digit.
#pragma once
#include "head_rows.cuh"

#if MOET_SM == 90

constexpr int LATENT_THREADS = 384;
constexpr int DECODERS = 128;
constexpr int LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE;
constexpr int TILE_BYTES = WIDTH / 64 * BLOCK_BYTES, TILES_HELD = 2;
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
template <class Key, int HEADS>
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

  // A fill row counts as one with a single position, of any page, and gets zeros.
  DEVICE LatentSight sight_of(int64_t position, int64_t page_row) const {
    int token = position < 0 ? 0 : static_cast<int>(position);
    return {token, static_cast<int>(page_row), token + 1 < p.top_k ? token + 1 : p.top_k};
  }

  // The last rows, which have most to attend to, come first, so that CTAs end together.
  DEVICE int first_row() const { return p.rows - 1 - static_cast<int>(blockIdx.x); }

  DEVICE void begin() {
    if (tid == 0) {
      for (int s = 0; s < TILES_HELD; s++) {
        barrier_init(full(s), DECODERS), barrier_init(empty(s), 8 * LEAVING), barrier_init(weighed(s), 128);
      }
      barrier_init(queries_full(), DECODERS), barrier_init(queries_empty(), 8 * LEAVING);
      barriers_are_ready();
    }
    sync_threads();
    wait_for_previous_kernel();
    let_next_kernel_start();
  }

  // ---- the warpgroup that decodes: four lanes a key, and two keys a lane ----

  // Where a key lies; one that does not exist is the row itself, and counts nothing.
  DEVICE const uint8_t* find(const LatentSight& s, int key, int choice) const {
    int number = key < s.visible && choice >= 0 ? choice : s.token;
    int64_t page = p.page_table[s.page_row * p.table_stride + number / p.per_page];
    if (page < 0) page = 0;  // of a fill row
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
    // The first key of the tile that comes, and where the second lies.
    const uint8_t* place = find(s, at + 8, choices[at + 8]);
    Key raw;
    load_key(raw, find(s, at, choices[at]));
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
        decode_key(raw, place, tile(stage), at);
        decode_key(raw, first, tile(stage), at + 8);
        place = second;
        fence_shared_for_matrix_units();
        barrier_arrive(full(stage));
        if (++stage == TILES_HELD) stage = 0, turn ^= 1;
      }
      s = next;
      row -= gridDim.x;
    }
  }

};
#endif
