// Attention of a chunk's rows over fp8 rows (cache.Fp8Rows: 448 e4m3 values in blocks of 64 with a scale
// each, 64 bf16 values that are turned), 64 heads. A CTA takes rows in turn: one warpgroup decodes keys,
// 64 at a time, to bf16 in shared memory; two others multiply, each with all keys and half of the values.
//
// A tile of keys is summed by itself, relative to its own maximum, and tiles are joined in ascending
// order, with the very operations of triton_attention.py: a row has the same bits in both.
#include "head_rows.cuh"

#if MOET_SM == 90  // sm_120a has no room for a tile of keys

constexpr int ATTEND_THREADS = 384;
constexpr int DECODERS = 128;
constexpr int HEADS = 64, DIM = 512, ROPE = 64, PLAIN = DIM - ROPE;
constexpr int ROW_DATA = PLAIN + 2 * ROPE, ROW_SCALES = 8;
constexpr int TILE_BYTES = DIM / 64 * BLOCK_BYTES, TILES_HELD = 2;

struct AttendArgs {
  const uint16_t* q;    // [rows, 64, 512] bf16
  const float* sink;    // [64]
  const uint8_t* window;   // the ring of older rows
  const uint8_t* chunk;    // one page: the chunk's own rows
  const uint8_t* entries;  // pages; null: none
  const int* selected;     // [rows, top_k], ascending; null: all visible entries
  const float* cos;        // [rows, 32]
  const float* sin;
  const int64_t* positions;
  const int64_t* starts;
  const int64_t* seq_slots;
  const int64_t* page_rows;
  const int64_t* page_table;
  uint16_t* out;  // [rows, 64, 512] bf16
  int64_t table_stride, ring_bytes, page_bytes;
  float scale;  // of logits, in powers of two
  int rows, chunk_entries, reach, ring, ratio, per_page, top_k;  // reach: tokens of the window
};

// What a row attends to: `recent` keys of the window, then `visible` entries. A fill row counts as token 0.
struct Sight {
  int token, start, seq_slot, page_row, recent, visible;

  DEVICE int recent_tiles() const { return (recent + KEYS - 1) / KEYS; }
  DEVICE int tiles() const { return recent_tiles() + (visible + KEYS - 1) / KEYS; }
};

// A row's numbers as they are read, which takes its time, and what follows from them later.
struct RowNumbers {
  int64_t position, start, seq_slot, page_row;
};
DEVICE RowNumbers numbers_of(const AttendArgs& p, int row) {
  return {p.positions[row], p.starts[row], p.seq_slots[row], p.page_rows[row]};
}
DEVICE Sight sight_of(const AttendArgs& p, const RowNumbers& row) {
  Sight s;
  s.token = row.position < 0 ? 0 : static_cast<int>(row.position);
  s.start = static_cast<int>(row.start), s.seq_slot = static_cast<int>(row.seq_slot);
  s.page_row = static_cast<int>(row.page_row);
  s.recent = s.token + 1 < p.reach ? s.token + 1 : p.reach;
  s.visible = p.entries ? (s.token + 1) / p.ratio : 0;
  if (p.selected && s.visible > p.top_k) s.visible = p.top_k;
  return s;
}

struct ChunkAttention : HeadRows<DIM / 64> {
  const AttendArgs& p;
  int tid;

  DEVICE ChunkAttention(const AttendArgs& args) : p(args) {
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
  DEVICE static uint8_t* tile(int s) { return queries() + (s + 1) * TILE_BYTES; }

  DEVICE void run() {
    if (tid == 0) {
      for (int s = 0; s < TILES_HELD; s++) barrier_init(full(s), DECODERS), barrier_init(empty(s), 8);
      barrier_init(queries_full(), DECODERS), barrier_init(queries_empty(), 8);
      barriers_are_ready();
    }
    sync_threads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (group == 2) {
      give_registers<88>();
      decode_all();
    } else {
      take_registers<208>();
      attend_all();
    }
  }

  // ---- the warpgroup that decodes: four lanes a key, and two keys a lane ----

  struct Key {
    const uint8_t* data;
    const uint8_t* scales;
  };
  // Sixteen bytes a lane of each block, and of the turned one twice; the scales.
  struct Raw {
    uint4 piece[PLAIN / 64 + 2];
    uint2 scales;
  };
  // Where a key will be looked for: its token, or its entry and that one's page; -1: there is none.
  struct Lookup {
    int number, page;
  };

  DEVICE int* chosen() const { return reinterpret_cast<int*>(tile(TILES_HELD)); }

  DEVICE Lookup look_up(const Sight& s, int tile, int key) const {
    int recent_tiles = s.recent_tiles();
    Lookup found = {-1, 0};
    if (tile < recent_tiles) {
      key += tile * KEYS;
      if (key < s.recent) found.number = s.token - s.recent + 1 + key;
    } else {
      key += (tile - recent_tiles) * KEYS;
      if (key < s.visible) {
        found.number = p.selected ? chosen()[key] : key;
        int64_t at = s.page_row * p.table_stride + found.number / p.per_page;
        found.page = static_cast<int>(p.page_table[at]);
      }
    }
    return found;
  }
  // A key that does not exist is the row itself, and counts nothing.
  DEVICE Key find(const Sight& s, int row, int tile, const Lookup& found) const {
    const uint8_t* page = p.chunk;
    int place = row, places = p.chunk_entries;
    if (tile >= s.recent_tiles()) {
      if (found.number >= 0) {
        page = p.entries + found.page * p.page_bytes;
        place = found.number % p.per_page, places = p.per_page;
      }
    } else if (found.number >= s.start) {
      place += found.number - s.token;
    } else if (found.number >= 0) {
      page = p.window + s.seq_slot * p.ring_bytes;
      place = found.number % p.ring, places = p.ring;
    }
    return {page + int64_t(place) * ROW_DATA, page + int64_t(places) * ROW_DATA + int64_t(place) * ROW_SCALES};
  }

  DEVICE void load_piece(Raw& raw, const Key& key, int i) const {
    int part = lane & 3, at = i < PLAIN / 64 ? i * 64 + part * 16 : PLAIN + (2 * part + i - PLAIN / 64) * 16;
    raw.piece[i] = *reinterpret_cast<const uint4*>(key.data + at);
  }
  DEVICE void load_scales(Raw& raw, const Key& key) const {
    raw.scales = *reinterpret_cast<const uint2*>(key.scales);
  }

  // Decodes a key into row `at` of a tile; piece by piece its registers take the next key.
  DEVICE void decode_key(Raw& raw, const Key& next, uint8_t* to, int at) const {
    int part = lane & 3;
    uint8_t* first = to + at * 128 + (((2 * part) ^ (at & 7)) * 16);
    uint8_t* second = to + at * 128 + (((2 * part + 1) ^ (at & 7)) * 16);
    uint2 scales = raw.scales;
    load_scales(raw, next);
#pragma unroll
    for (int b = 0; b < PLAIN / 64; b++) {
      uint32_t byte = (b < 4 ? scales.x >> (8 * b) : scales.y >> (8 * (b - 4))) & 0xFF;
      uint32_t factor = (byte + 120 < 255 ? byte + 120 : 254) << 7;  // codes lie 2^120 too low
      factor |= factor << 16;
      uint4 codes = raw.piece[b];
      load_piece(raw, next, b);
      *reinterpret_cast<uint4*>(first + b * BLOCK_BYTES) = decode_e4m3(codes.x, codes.y, factor);
      *reinterpret_cast<uint4*>(second + b * BLOCK_BYTES) = decode_e4m3(codes.z, codes.w, factor);
    }
    *reinterpret_cast<uint4*>(first + PLAIN / 64 * BLOCK_BYTES) = raw.piece[PLAIN / 64];
    *reinterpret_cast<uint4*>(second + PLAIN / 64 * BLOCK_BYTES) = raw.piece[PLAIN / 64 + 1];
    load_piece(raw, next, PLAIN / 64), load_piece(raw, next, PLAIN / 64 + 1);
  }

  DEVICE void copy_queries(int row) const {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(p.q) + uint64_t(row) * (HEADS * DIM * 2);
    int mine = tid - 2 * 128;
#pragma unroll 8
    for (int i = mine; i < HEADS * DIM / 8; i += DECODERS) {
      int head = i / 64, block = i / 8 % 8, column = i % 8;
      copy16(queries() + block * BLOCK_BYTES + head * 128 + ((column ^ (head & 7)) * 16), from + i * 16, true);
    }
    commit_copies();
  }
  // What this warp's keys are, of all tiles of entries: it alone reads them.
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

  DEVICE void decode_all() {
    int stage = 0, turn = 1, query_turn = 1;  // a new barrier's phase before the first counts as ended
    int row = blockIdx.x, at = warp * 16 + (lane >> 2);
    if (row >= p.rows) return;
    Sight s = sight_of(p, numbers_of(p, row));
    Key key = find(s, row, 0, look_up(s, 0, at)), other = find(s, row, 0, look_up(s, 0, at + 8));
    Raw raw;
#pragma unroll
    for (int i = 0; i < PLAIN / 64 + 2; i++) load_piece(raw, key, i);
    load_scales(raw, key);
    while (row < p.rows) {
      int after = row + gridDim.x < p.rows ? row + gridDim.x : row;
      RowNumbers numbers = numbers_of(p, after);
      barrier_wait(queries_empty(), query_turn);
      query_turn ^= 1;
      copy_queries(row);
      if (p.selected) copy_chosen(row);
      Sight next = sight_of(p, numbers);
      int tiles = s.tiles();
      bool early = s.recent_tiles() == 1;  // then the next tile is one of entries
      if (early) show_queries();
#pragma unroll 1
      for (int i = 0; i < tiles; i++) {
        bool last = i + 1 == tiles;
        Sight of = last ? next : s;
        int of_row = last ? after : row, of_tile = last ? 0 : i + 1;
        Lookup first = look_up(of, of_tile, at), second = look_up(of, of_tile, at + 8);
        barrier_wait(empty(stage), turn);
        decode_key(raw, other, tile(stage), at);
        key = find(of, of_row, of_tile, first), other = find(of, of_row, of_tile, second);
        decode_key(raw, key, tile(stage), at + 8);
        fence_shared_for_matrix_units();
        barrier_arrive(full(stage));
        if (++stage == TILES_HELD) stage = 0, turn ^= 1;
        if (i == 0 && !early) show_queries();
      }
      s = next;
      row += gridDim.x;
    }
  }

  // ---- the warpgroups that multiply ----

  DEVICE void attend_all() {
    int stage = 0, parity = 0, query_parity = 0;
    RowNumbers numbers = numbers_of(p, blockIdx.x < p.rows ? blockIdx.x : 0);
    float sinks[2];
#pragma unroll
    for (int r = 0; r < 2; r++) sinks[r] = p.sink[warp * 16 + (lane >> 2) + 8 * r];
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
      Sight s = sight_of(p, numbers);
      int after = row + gridDim.x;
      if (after < p.rows) numbers = numbers_of(p, after);
      clear();
      barrier_wait(queries_full(), query_parity);
      query_parity ^= 1;
      int tiles = s.tiles(), recent_tiles = s.recent_tiles();
#pragma unroll 1
      for (int i = 0; i < tiles; i++) {
        bool recent = i < recent_tiles;
        barrier_wait(full(stage), parity);
        int count = recent ? s.recent - i * KEYS : s.visible - (i - recent_tiles) * KEYS;
        attend_tile(queries(), tile(stage), count, p.scale, i + 1 == tiles, queries_empty(), empty(stage));
        if (++stage == TILES_HELD) stage = 0, parity ^= 1;
      }
      finish(row, sinks);
    }
  }

  DEVICE void finish(int row, const float* sinks) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sink = sinks[r], log2e = 1.4426950408889634f;
      float shift = larger(top[r], mul_rn(sink, log2e));
      float share = exp2_approx(add_rn(top[r], -shift));
      factor[r] = div_full(share, fma_rn(total[r], share, exp2_approx(fma_rn(sink, log2e, -shift))));
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
#pragma unroll
      for (int i = 0; i < 32; i++) acc[b][i] = round_to_bf16(mul_rn(acc[b][i], factor[i >> 1 & 1]));
      if (b == 3 && group == 1) turn_back(row, acc[b]);
      store(p.out, row, HEADS, b, acc[b]);
    }
  }
  DEVICE void turn_back(int row, float* v) const {
#pragma unroll
    for (int n = 0; n < 8; n++) {
      int at = row * (ROPE / 2) + n * 4 + (lane & 3);
      float c = p.cos[at], s = 0.0f - p.sin[at];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float a = v[4 * n + 2 * r], b = v[4 * n + 2 * r + 1];
        v[4 * n + 2 * r] = fma_rn(c, a, -mul_rn(s, b));
        v[4 * n + 2 * r + 1] = fma_rn(c, b, mul_rn(s, a));
      }
    }
  }
};

KERNEL(ATTEND_THREADS, 1) attend_chunk(GRID_CONSTANT AttendArgs args) { ChunkAttention(args).run(); }
LAUNCHABLE(attend_chunk, AttendArgs, ATTEND_THREADS)
#endif
