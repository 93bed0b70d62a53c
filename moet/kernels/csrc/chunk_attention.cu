// Attention of a chunk's rows over fp8 rows (cache.Fp8Rows: 448 e4m3 values in blocks of 64 with a scale
// each, 64 bf16 values that are turned), 64 heads. A CTA takes rows in turn: one warpgroup decodes keys,
// 64 at a time, to bf16 in shared memory; two others multiply: each weighs every other tile of keys, for both,
// and each multiplies all tiles with its half of the values.
//
// A tile of keys is summed by itself, relative to its own maximum, and tiles are joined in ascending
// order, with the very operations of triton_attention.py: a row has the same bits in both. Its output is rounded
// to e4m3, per 128 values of a head, as the grouped product behind it takes them: rows of codes or tiles.
#include "codec.cuh"
#include "head_rows.cuh"
#include "token_tile.cuh"

#if MOET_SM == 90  // sm_120a has no room for a tile of keys

constexpr int ATTEND_THREADS = 384;
constexpr int DECODERS = 128;
constexpr int HEADS = 64, DIM = 512, ROPE = 64, PLAIN = DIM - ROPE;
constexpr int ROW_DATA = PLAIN + 2 * ROPE, ROW_SCALES = 8;
constexpr int TILE_BYTES = DIM / 64 * BLOCK_BYTES, TILES_HELD = 2;
constexpr int MAX_CHOSEN = 512, WEIGHED_PIECES = 5;

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
  uint8_t* codes;  // [rows, 64, 512] e4m3 in the order of matrix units, or tiles of TILE_TOKENS of a group
  float* scales;   // [rows, 64, 4]; null: within tiles
  int64_t table_stride, ring_bytes, page_bytes;
  float scale;  // of logits, in powers of two
  int rows, chunk_entries, reach, ring, ratio, page_bits, top_k;  // reach: tokens of the window
  int group_heads;  // heads of a group, whose tiles lie together
};
constexpr int TILE_TOKENS = 128, CHUNK = 128;  // of a tile; values with one scale

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

  // Barriers: a tile is here, a tile's two readers are done; the same of the queries. A tile is weighed.
  DEVICE static uint64_t* full(int s) { return reinterpret_cast<uint64_t*>(dynamic_shared()) + s; }
  DEVICE static uint64_t* empty(int s) { return full(TILES_HELD + s); }
  DEVICE static uint64_t* queries_full() { return full(2 * TILES_HELD); }
  DEVICE static uint64_t* queries_empty() { return full(2 * TILES_HELD + 1); }
  DEVICE static uint64_t* weighed(int s) { return full(2 * TILES_HELD + 2 + s); }
  DEVICE static uint8_t* queries() { return dynamic_shared() + 1024; }
  DEVICE static uint8_t* tile(int s) { return queries() + (s + 1) * TILE_BYTES; }

  DEVICE void run() {
    if (tid == 0) {
      for (int s = 0; s < TILES_HELD; s++)
        barrier_init(full(s), DECODERS), barrier_init(empty(s), 8 * LEAVING), barrier_init(weighed(s), 4 * LEAVING);
      barrier_init(queries_full(), DECODERS), barrier_init(queries_empty(), 8 * LEAVING);
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

  DEVICE static int* chosen() { return reinterpret_cast<int*>(tile(TILES_HELD)); }

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
        int64_t at = s.page_row * p.table_stride + (found.number >> p.page_bits);
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
        places = 1 << p.page_bits, place = found.number & (places - 1);
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
      int exponent = static_cast<int>(permute(b < 4 ? scales.x : scales.y, 0, 0x4440 + b % 4)) + 120;
      uint32_t factor = (exponent < 254 ? exponent : 254) * 0x00800080;  // codes lie 2^120 too low
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
    int mine = tid - 2 * 128, block = mine / 8 % 8, column = mine % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int head = mine / 64 + 2 * i;  // and every eighth, whose pieces are swizzled alike
      const uint8_t* own = from + head * (DIM * 2) + mine % 64 * 16;
      uint8_t* to = queries() + block * BLOCK_BYTES + head * 128 + (column ^ head) * 16;
#pragma unroll
      for (int j = 0; j < HEADS / 8; j++) copy16(to + j * (8 * 128), own + j * (8 * DIM * 2), true);
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

  // What threads of the same place in both warpgroups know of a tile, in pieces of sixteen bytes.
  DEVICE uint4* shared_weights(int s) const {
    return reinterpret_cast<uint4*>(chosen() + MAX_CHOSEN) + s * (WEIGHED_PIECES * 128) + (tid & 127);
  }
  DEVICE void publish(int s, const Weighed& w) const {
#pragma unroll
    for (int k = 0; k < 4; k++)
      shared_weights(s)[k * 128] = {w.weights[k][0], w.weights[k][1], w.weights[k][2], w.weights[k][3]};
    shared_weights(s)[4 * 128] = {float_bits(w.top[0]), float_bits(w.top[1]), float_bits(w.total[0]),
                                  float_bits(w.total[1])};
    leave(weighed(s), lane);
  }
  DEVICE void read_weighed(int s, Weighed& w) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint4 v = shared_weights(s)[k * 128];
      w.weights[k][0] = v.x, w.weights[k][1] = v.y, w.weights[k][2] = v.z, w.weights[k][3] = v.w;
    }
    uint4 v = shared_weights(s)[4 * 128];
    w.top[0] = bits_float(v.x), w.top[1] = bits_float(v.y);
    w.total[0] = bits_float(v.z), w.total[1] = bits_float(v.w);
  }

  DEVICE void attend_all() {
    int done = 0, query_parity = 0;  // tiles so far
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
      if (group >= tiles) leave(queries_empty(), lane);  // has none to weigh
#pragma unroll 1
      for (int i = 0; i < tiles; i += 2) {
        int own = i + group;
        if (own < tiles) {
          int stage = (done + own) % TILES_HELD;
          int count = own < recent_tiles ? s.recent - own * KEYS : s.visible - (own - recent_tiles) * KEYS;
          Weighed w;
          barrier_wait(full(stage), (done + own) / TILES_HELD & 1);
          weigh_tile(queries(), tile(stage), count, p.scale, own + 2 >= tiles, queries_empty(), w);
          publish(stage, w);
        }
#pragma unroll 1
        for (int j = i; j < i + 2 && j < tiles; j++) {
          int stage = (done + j) % TILES_HELD;
          Weighed w;
          barrier_wait(weighed(stage), (done + j) / TILES_HELD & 1);
          read_weighed(stage, w);
          join_tile(tile(stage), w, empty(stage));
        }
      }
      done += tiles;
      finish(row, sinks);
    }
  }

  DEVICE void finish(int row, const float* sinks) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sink = sinks[r], log2e = 1.4426950408889634f;
      float shift = maximum(top[r], mul_rn(sink, log2e));
      float share = exp2_approx(add_rn(top[r], -shift));
      factor[r] = div_full(share, fma_rn(total[r], share, exp2_approx(fma_rn(sink, log2e, -shift))));
    }
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
      for (int i = 0; i < 32; i++) acc[b][i] = mul_rn(acc[b][i], factor[i >> 1 & 1]);
    if (group == 1) turn_back(row, acc[3]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      Place place = place_of(row, warp * 16 + (lane >> 2) + 8 * r);
#pragma unroll
      for (int c = 0; c < 2; c++) store_codes(place, c, acc[2 * c] + 2 * r, acc[2 * c + 1] + 2 * r);
    }
  }

  // Where a head's codes and scales go: the first of this warpgroup's, and how far apart those of chunks are.
  struct Place {
    uint8_t *codes, *scales;
    int codes_apart, scales_apart, pieces_apart;
  };
  DEVICE Place place_of(int row, int head) const {
    constexpr int CHUNKS = DIM / CHUNK, STAGE = stage_bytes(TILE_TOKENS, true);
    int first = group * (CHUNKS / 2);
    if (p.scales) {
      int64_t at = (int64_t(row) * HEADS + head) * CHUNKS + first;
      return {p.codes + at * CHUNK, reinterpret_cast<uint8_t*>(p.scales + at), CHUNK, 4, 16};
    }
    int tiles = (p.rows + TILE_TOKENS - 1) / TILE_TOKENS, token = row % TILE_TOKENS, of = head / p.group_heads;
    int64_t tile = int64_t(of) * tiles + row / TILE_TOKENS;
    uint8_t* stage = p.codes + ((tile * p.group_heads + head - of * p.group_heads) * CHUNKS + first) * STAGE;
    uint8_t* pieces = stage + scale_bytes(TILE_TOKENS, true) + piece_of_token(token);
    return {pieces, stage + token * 4, STAGE, STAGE, PIECE_BYTES};
  }

  // 128 values of a head, [2][n][4] from v and w on, a pair of each four this lane's: rounded to bf16, then to
  // e4m3. Neighbours exchange codes, so that each stores a piece of either 64.
  DEVICE void store_codes(const Place& place, int c, const float* v, const float* w) const {
    float high[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) high[i] = maximum(high[i], maximum(fabsf(v[4 * n + i]), fabsf(w[4 * n + i])));
    float amax = maximum(high[0], high[1]);
    amax = maximum(amax, shuffle_xor(amax, 1));
    amax = round_to_bf16(maximum(amax, shuffle_xor(amax, 2)));
    int exponent = activation_exponent(amax);
    uint32_t inverse = float_bits(power_of_two(-exponent)) >> 16;
    inverse |= inverse << 16;
    if ((lane & 3) == 0) *reinterpret_cast<float*>(place.scales + c * place.scales_apart) = power_of_two(exponent);
    bool odd = lane & 1;
    uint8_t* to = place.codes + c * place.codes_apart + (2 * odd + (lane >> 1 & 1)) * place.pieces_apart;
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const float* from = b ? w : v;
      uint32_t q[4];
#pragma unroll
      for (int i = 0; i < 4; i++) q[i] = code_pair(from + 8 * i, inverse) | code_pair(from + 8 * i + 4, inverse) << 16;
      uint32_t own[2] = {odd ? q[2] : q[0], odd ? q[3] : q[1]}, theirs[2];
#pragma unroll
      for (int i = 0; i < 2; i++) theirs[i] = shuffle(odd ? q[i] : q[2 + i], lane ^ 1);
      uint32_t low = odd ? 0x1054 : 0x5410, high_halves = odd ? 0x3276 : 0x7632;
      *reinterpret_cast<uint4*>(to + 4 * b * place.pieces_apart) = {
          permute(own[0], theirs[0], low), permute(own[0], theirs[0], high_halves), permute(own[1], theirs[1], low),
          permute(own[1], theirs[1], high_halves)};
    }
  }
  DEVICE static uint32_t code_pair(const float* v, uint32_t inverse) {
    uint32_t both = multiply_bf16x2(to_bf16(v[0]) | static_cast<uint32_t>(to_bf16(v[1])) << 16, inverse);
    return to_e4m3x2(bits_float(both << 16), bits_float(both & 0xFFFF0000u));
  }

  DEVICE void turn_back(int row, float* v) const {
#pragma unroll
    for (int n = 0; n < 8; n++) {
      int at = row * (ROPE / 2) + n * 4 + (lane & 3);
      float c = p.cos[at], s = 0.0f - p.sin[at];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        uint32_t both = to_bf16(v[4 * n + 2 * r]) | static_cast<uint32_t>(to_bf16(v[4 * n + 2 * r + 1])) << 16;
        float a = bits_float(both << 16), b = bits_float(both & 0xFFFF0000u);
        v[4 * n + 2 * r] = fma_rn(c, a, -mul_rn(s, b));
        v[4 * n + 2 * r + 1] = fma_rn(c, b, mul_rn(s, a));
      }
    }
  }
};

KERNEL(ATTEND_THREADS, 1) attend_chunk(GRID_CONSTANT AttendArgs args) { ChunkAttention(args).run(); }
LAUNCHABLE(attend_chunk, AttendArgs, ATTEND_THREADS)
#endif
