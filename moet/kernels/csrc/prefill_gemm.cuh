// GEMM for many rows on the planes of the streaming GEMM: a CTA computes 128 weight rows of one tile of
// up to 8 GROUPS tokens. Weights are decoded once per tile in registers and meet all its tokens; the next
// chunk's are read while the matrix units are busy. Each lane copies its own weights through a private
// ring, ahead and across tiles (DEPTH 0: reads them a chunk ahead); the tokens come as tiles laid out for
// the matrix units (TileArgs), one copy a chunk, by a warpgroup of its own.
//
// The sum of a row has the very order of stream_gemm.cuh (segments, halves, slices), so that a token's
// result has the same bits whether it was prefilled or decoded, and whatever else was in its tile.
// Partial sums that wait for their turn lie in shared memory, private to their thread.
#pragma once
#include "nvfp4.cuh"
#include "stream_gemm.cuh"
#include "tile.cuh"
#include "token_tile.cuh"

constexpr int PREFILL_THREADS = 384;  // two warpgroups that multiply, one whose first thread copies
constexpr int STAGED_COLUMNS = 72;    // of a staged token: 64, and room that keeps banks apart

template <int CODEC, int GROUPS, int EPILOGUE, int STAGES, int DEPTH>
struct PrefillGemm {
  static constexpr int TOKENS = 8 * GROUPS;
  static constexpr bool FEW = MOET_SM == 90 && GROUPS <= 4;  // two CTAs share an SM
  // Token groups of an entry at most: NVFP4 sums three times and has registers for fewer.
  static constexpr int MOST = CODEC == NVFP4 ? (MOET_SM == 90 ? 12 : 4) : GROUPS;
  static constexpr int CODE_BYTES = CODEC == NVFP4 ? 1024 : chunk_bytes(CODEC);  // of a warp's chunk
  static constexpr int WORDS = CODE_BYTES / 512;
  static constexpr bool SCALED = CODEC != BF16;
  static constexpr bool POWERS = has_scale_plane(CODEC);      // weight scales ride in exponents
  static constexpr bool PLANE = POWERS || CODEC == NVFP4;     // a word of scales a lane
  // A stage: the scales of a chunk's tokens, then the tokens. A place: a chunk's weights, of all lanes.
  static constexpr int TOKEN_SCALE_BYTES = scale_bytes(TOKENS, SCALED);
  static constexpr int STAGE_BYTES = stage_bytes(TOKENS, SCALED);
  static constexpr int CODE_PLACE_BYTES = THREADS * WORDS * 16;
  static constexpr bool BASES = POWERS && MOET_SM == 90;
  static constexpr int PLACE_BYTES = CODE_PLACE_BYTES + (BASES ? THREADS * 8 : PLANE ? THREADS * 4 : CODEC == FP8 ? 64 : 0);
  static constexpr int VALUES = 4 * GROUPS;  // accumulators of a thread
  // What a warpgroup stages: its results, and the rows (SWIGLU: and weights) of the tokens.
  static constexpr int STAGED_TOKENS = EPILOGUE == SWIGLU ? TOKENS / 2 : TOKENS;
  static constexpr int STAGED_BYTES = STAGED_TOKENS * STAGED_COLUMNS * 2 + TOKENS * 8;

  const StreamArgs& p;
  int tid, lane, warp, group, total_chunks, items;

  // Where this lane's copies are: an item and a chunk of it.
  int next_item, next_chunk, next_in_segment;
  const uint8_t *codes, *scales, *bases;

  // What is read of a chunk ahead of its turn.
  struct Chunk {
    uint32_t codes[4 * WORDS];
    RowScale scale;
    uint32_t base;
    float weight_scale;
  } ahead;
  int place, stage, parity;

  // The item at work, and what this thread knows of its token tid % 128.
  Entry now;
  int segment, in_segment_tile, token_row;
  float token_weight, tensor_scale;

  DEVICE PrefillGemm(const StreamArgs& args) : p(args) {
    tid = threadIdx.x;
    lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);
    warp = uniform & 3;
    group = uniform >> 2;
    total_chunks = p.segments * p.chunks;
  }

  // A stage's barriers: its bytes are here; its eight warps are done with them.
  DEVICE static uint64_t* full(int s) { return reinterpret_cast<uint64_t*>(dynamic_shared()) + s; }
  DEVICE static uint64_t* empty(int s) { return full(STAGES + s); }
  DEVICE static uint8_t* ring(int s) { return dynamic_shared() + 128 + s * STAGE_BYTES; }
  DEVICE static uint8_t* tokens_at(int s) { return ring(s) + TOKEN_SCALE_BYTES; }
  DEVICE static uint8_t* places(int s) { return ring(STAGES) + s * PLACE_BYTES; }
  // Places of this thread, 128 floats apart, of warpgroups one after the other. Those of a are there if
  // segments or slices are several.
  DEVICE float* waiting_b() const {
    return reinterpret_cast<float*>(places(DEPTH)) + group * VALUES * 128 + (tid & 127);
  }
  DEVICE float* waiting_a() const { return waiting_b() + 2 * VALUES * 128; }
  // SWIGLU has no waiting_a: what a warpgroup (of_group) gives to the other lies there.
  DEVICE float* given(int of_group) const {
    return reinterpret_cast<float*>(places(DEPTH)) + (4 + of_group) * (VALUES / 2 * 128) + (tid & 127);
  }
  // Results of a warpgroup, token by token; where its sums waited, or after what is given.
  DEVICE uint16_t* staged() const {
    int before = EPILOGUE == SWIGLU ? 3 * VALUES * 512 + group * STAGED_BYTES : group * VALUES * 512;
    return reinterpret_cast<uint16_t*>(places(DEPTH) + before);
  }
  DEVICE int* token_rows() const { return reinterpret_cast<int*>(staged() + STAGED_TOKENS * STAGED_COLUMNS); }
  DEVICE float* token_weights() const { return reinterpret_cast<float*>(token_rows() + TOKENS); }

  DEVICE Entry entry(int e) const {
    if (p.entries) return p.entries[e];
    int first = e * TOKENS, left = p.num_rows - first;
    return {0, 0, first, left < TOKENS ? left : TOKENS};
  }
  // The widths in token groups that are compiled; dense tiles are full but for the last.
  DEVICE static constexpr bool compiled(int groups) {
    return groups <= MOST && tile_groups(groups) == groups && (PLANE || groups % 4 == 0);
  }
  DEVICE static int groups_of(int count) {
    int groups = (count + 7) / 8;
    groups = PLANE ? tile_groups(groups) : (groups + 3) / 4 * 4;
    return groups > MOST ? MOST : groups;
  }
  DEVICE int base_row() const { return (lane >> 2) + 8 * (lane & 1); }
  // Bytes from a segment's scale words to those of its chunk number in_segment.
  DEVICE static int word_offset(int in_segment) {
    return CODEC == FP8 ? in_segment * 4 : (POWERS ? in_segment / 2 : in_segment) * 128;
  }
  // SWIGLU: warpgroup 0 takes 64 gate rows, warpgroup 1 the same rows of up.
  DEVICE int row_tile(int in_segment) const {
    return EPILOGUE == SWIGLU ? in_segment * 4 + warp : in_segment * 8 + group * 4 + warp;
  }

  // The copying thread: a chunk of tokens in one piece.
  DEVICE void copy_all() {
    int to = 0, turn = 1;  // a new barrier's phase before the first counts as ended
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      int e = item / p.tiles;
      uint32_t bytes = TOKEN_SCALE_BYTES + groups_of(entry(e).count) * 1024;
      const uint8_t* from = static_cast<const uint8_t*>(p.x) + uint64_t(e) * total_chunks * STAGE_BYTES;
      for (int chunk = 0; chunk < total_chunks; chunk++) {
        barrier_wait(empty(to), turn);
        barrier_arrive_expecting(full(to), bytes);
        copy_bulk(ring(to), from, bytes, full(to));
        from += STAGE_BYTES;
        if (++to == STAGES) to = 0, turn ^= 1;
      }
    }
  }

  // Points the copies at the first chunk of their item.
  DEVICE void aim() {
    next_chunk = next_in_segment = 0;
    if (next_item >= items) return;
    int e = next_item / p.tiles, tile = next_item - e * p.tiles;
    int out_segment = tile / p.tiles_per_segment;
    Entry t = entry(e);
    if (t.slot < 0 || t.slot >= p.num_slots) t.slot = t.expert = 0;  // reported in finish
    const Part& part = p.parts[EPILOGUE == SWIGLU ? group : 0];
    int at = row_tile(tile - out_segment * p.tiles_per_segment);
    if (at * 16 >= p.padded_rows) at = 0;  // past the last row: computed, not stored
    const uint8_t* row = p.weights + t.slot * p.row_stride + out_segment * uint64_t(p.segment_stride);
    const uint8_t* base = p.bases + t.expert * p.base_stride + out_segment * p.base_segment_stride + part.bases;
    codes = row + part.codes + uint64_t(at) * (p.chunks * CODE_BYTES) + lane * 16;
    if constexpr (PLANE) {
      scales = row + part.scales + at * word_offset(p.chunks + (POWERS ? 1 : 0)) + lane * 4;
      bases = base + at * 16 + base_row() / 4 * 4;
    } else if constexpr (CODEC == FP8) {
      scales = base + at / 8 * (p.chunks * 4);
    }
  }

  DEVICE uint8_t* codes_at(int s) const { return places(s) + tid * 16; }
  DEVICE uint8_t* words_at(int s) const {
    return places(s) + CODE_PLACE_BYTES + (PLANE ? tid * 4 : (group * 4 + warp) * 4);
  }

  // Copies the next chunk of weights into a place, then steps. Commits a group in any case.
  DEVICE void fetch(int to) {
    if (next_item < items) {
#pragma unroll
      for (int i = 0; i < WORDS; i++) copy16(codes_at(to) + i * (16 * THREADS), codes + i * 512, true);
      if constexpr (PLANE) copy4(words_at(to), scales + word_offset(next_in_segment), true);
      if constexpr (BASES) copy4(words_at(to) + 4 * THREADS, bases, true);
      if constexpr (CODEC == FP8)
        if (lane == 0) copy4(words_at(to), scales + word_offset(next_in_segment), true);
      step();
    }
    commit_copies();
  }
  DEVICE void step() {
    codes += CODE_BYTES;
    if (++next_in_segment == p.chunks) {
      next_in_segment = 0;
      codes += uint64_t(p.segment_stride) - uint64_t(p.chunks) * CODE_BYTES;
      if constexpr (PLANE) scales += p.segment_stride, bases += p.base_segment_stride;
    }
    if (++next_chunk == total_chunks) {
      next_item += gridDim.x;
      aim();
    }
  }

  DEVICE static uint32_t load_word(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }

  // Reads the next chunk, which is number in_segment of its segment, at `place` or where it lies.
  DEVICE void read_ahead(int in_segment) {
    const uint8_t* from = codes;
    const uint8_t* word_at = scales;
    int stride = 512;
    if constexpr (DEPTH > 0) {
      wait_copies<DEPTH - 1>();
      from = codes_at(place), word_at = words_at(place), stride = 16 * THREADS;
    } else {
      if (next_item >= items) return;
      if constexpr (SCALED) word_at += word_offset(in_segment);
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      uint4 v = *reinterpret_cast<const uint4*>(from + i * stride);
      ahead.codes[4 * i] = v.x, ahead.codes[4 * i + 1] = v.y;
      ahead.codes[4 * i + 2] = v.z, ahead.codes[4 * i + 3] = v.w;
    }
    if constexpr (PLANE) {
      uint32_t word = load_word(word_at);
      ahead.scale.lane = word;
      if constexpr (BASES) {
        uint32_t base = load_word(DEPTH > 0 ? word_at + 4 * THREADS : bases);
        ahead.base = base >> (8 * (base_row() & 3)) & 0xFF;
        uint32_t exponents = saturating_subtract(word, ahead.base * 0x01010101u) << 2;
        int quad = (lane & ~3) + 2 * (in_segment & 1);
        ahead.scale.word0 = shuffle(exponents, quad);
        ahead.scale.word1 = shuffle(exponents, quad + 1);
      }
    } else if constexpr (CODEC == FP8) {
      uint32_t word = 0;
      if (lane == 0) word = load_word(word_at);  // it copied the warp's
      ahead.weight_scale = bits_float(shuffle(word, 0));
    }
    if constexpr (DEPTH == 0) step();
  }

  // This warp is done with a stage. A load may be served after its warp has arrived at a barrier: so this
  // comes behind a branch that comes behind everything that computes with what was loaded. The debug
  // build lets every lane say so: race checkers follow that.
  DEVICE void leave_stage() {
    sync_warp();
    if (LEAVING == THREADS || lane == 0) barrier_arrive(empty(stage));
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
#ifdef MOET_DEBUG
  static constexpr int LEAVING = THREADS;
#else
  static constexpr int LEAVING = THREADS / 32;
#endif

  // The scales of this lane's tokens at the stage.
  template <int NT>
  DEVICE void read_scales(float* scales_of) const {
    if constexpr (SCALED) {
      const float* s = reinterpret_cast<const float*>(ring(stage)) + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < NT; n++) scales_of[2 * n] = s[8 * n], scales_of[2 * n + 1] = s[8 * n + 1];
    }
  }

  // part[NT][4] of a stage, times the scales of its tokens, is added to sum.
  template <int NT>
  DEVICE static void fold(float* sum, const float* part, const float* scales_of, float weight_scale) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if constexpr (SCALED) {
        float s0 = scales_of[2 * n], s1 = scales_of[2 * n + 1];
        if constexpr (CODEC == FP8) s0 *= weight_scale, s1 *= weight_scale;
        sum[4 * n] = fma_rn(part[4 * n], s0, sum[4 * n]);
        sum[4 * n + 1] = fma_rn(part[4 * n + 1], s1, sum[4 * n + 1]);
        sum[4 * n + 2] = fma_rn(part[4 * n + 2], s0, sum[4 * n + 2]);
        sum[4 * n + 3] = fma_rn(part[4 * n + 3], s1, sum[4 * n + 3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[4 * n + i] += part[4 * n + i];
      }
    }
  }

  // Multiplies the next stage with the chunk that was read ahead, and reads the one after it meanwhile.
  // Returns the chunk's row base. The caller leaves the stage.
  template <int NT>
  DEVICE uint32_t multiply_chunk(float* sum, int in_segment) {
    Chunk chunk = ahead;
    int following = in_segment + 1 == p.chunks ? 0 : in_segment + 1;
    float part[4 * NT], scales_of[2 * NT];
    if constexpr (CODEC == NVFP4) {
      next_chunk_of_weights(following);
      barrier_wait(full(stage), parity);
      read_scales<NT>(scales_of);
      multiply_blocks<NT>(part, chunk);
    } else {
      uint32_t a[4][4];
#pragma unroll
      for (int j = 0; j < 4; j++) decode_block<CODEC>(chunk.codes, j, chunk.scale, p.masks, a[j]);
      if constexpr (DEPTH == 0) next_chunk_of_weights(following);
      barrier_wait(full(stage), parity);
      read_scales<NT>(scales_of);
      BOperand b = b_operand(tokens_at(stage), 1024);
      mma_begin();
#if MOET_SM == 120
      if (in_segment & 1)
        wide_chunk<CODEC, NT, 1>(part, a, b, chunk.scale);
      else
#endif
        wide_chunk<CODEC, NT, 0>(part, a, b, chunk.scale);
      mma_commit();
      // Codes that are operands as they stand may not be overwritten while they are read.
      if constexpr (DEPTH > 0 && PLANE) next_chunk_of_weights(following);
      mma_wait<0>();
      results_are_here<4 * NT>(part);
      if constexpr (DEPTH > 0 && !PLANE) next_chunk_of_weights(following);
    }
    fold<NT>(sum, part, scales_of, chunk.weight_scale);
    return chunk.base;
  }
  DEVICE void next_chunk_of_weights(int in_segment) {
    if constexpr (DEPTH > 0) {
      fetch(place);
      if (++place == DEPTH) place = 0;
    }
    read_ahead(in_segment);
  }

  // NVFP4, in the order of nvfp4.cuh: a matrix instruction a block of 16 columns, whose results are
  // added to the chunk's times the block's scale.
  template <int NT>
  DEVICE void multiply_blocks(float* sum, const Chunk& chunk) const {
    BOperand b = b_operand(tokens_at(stage), 1024);
    uint32_t low_block = lane & 2 ? 0u : ~0u;  // lanes with columns 0..15 of every 32
    uint32_t e = 14 * 0x04040404u, low = e2m1_low(e), high = e2m1_high(e);
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) sum[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t all[4];
      decode_e2m1(chunk.codes[2 * j], low, high, low, high, all);
      decode_e2m1(chunk.codes[2 * j + 1], low, high, low, high, all + 2);
      uint32_t row0 = shuffle(chunk.scale.lane, (lane & ~3) + j / 2 * 2);
      uint32_t row1 = shuffle(chunk.scale.lane, (lane & ~3) + j / 2 * 2 + 1);
#pragma unroll
      for (int block = 0; block < 2; block++) {
        uint32_t a[4], mask = block ? ~low_block : low_block;
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = all[i] & mask;
        float s0 = e4m3_scale(row0, j % 2 * 2 + block), s1 = e4m3_scale(row1, j % 2 * 2 + block);
        BOperand columns = b_advance(b, 256 * j);
#if MOET_SM == 90
        float part[4 * NT];
        mma_begin();
        wide_mma<MXFP4, NT>(part, a, columns, 0);
        mma_commit();
        mma_wait<0>();
        results_are_here<4 * NT>(part);
#pragma unroll
        for (int i = 0; i < 4 * NT; i++) sum[i] = fma_rn(part[i], i % 4 < 2 ? s0 : s1, sum[i]);
#else  // a group at a time: few registers
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float part[4];
          mma_scaled<MXFP4, 1, 0, 0>(part, a, b_advance(columns, 1024 * n), 0, 0x7F7F7F7Fu);
#pragma unroll
          for (int i = 0; i < 4; i++) sum[4 * n + i] = fma_rn(part[i], i < 2 ? s0 : s1, sum[4 * n + i]);
        }
#endif
      }
    }
  }

  // Sum times the rows' factor, plus what waits at `with`, if it does.
  template <int NT>
  DEVICE void close(float* sum, uint32_t base, const float* with) const {
    float f0 = CODEC == NVFP4 ? tensor_scale : row_factor<CODEC>(base), f1 = f0;
    if constexpr (BASES) {
      f0 = row_factor<CODEC>(shuffle(base, lane & ~3));
      f1 = row_factor<CODEC>(shuffle(base, (lane & ~3) + 1));
    }
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) {
      float f = i % 4 < 2 ? f0 : f1;
      sum[i] = with ? fma_rn(sum[i], f, with[i * 128]) : sum[i] * f;
    }
  }
  template <int NT>
  DEVICE static void add(float* sum, const float* waiting) {
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) sum[i] = waiting[i * 128] + sum[i];
  }
  template <int NT>
  DEVICE static void put(float* sum, float* waiting) {
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) {
      waiting[i * 128] = sum[i];
      sum[i] = 0.0f;
    }
  }

  // All chunks of the item at work, its tile computed as 8 NT tokens.
  template <int NT>
  DEVICE void multiply_item(float* sum) {
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) sum[i] = 0.0f;
    int slice_chunks = total_chunks / p.slices, in_segment = 0, in_slice = 0, slice = 0;
    bool half_open = false;  // waiting_a holds earlier segments of this half
#pragma unroll 1
    for (int chunk = 0; chunk < total_chunks; chunk++) {
      if (chunk > 0) leave_stage();
      uint32_t base = multiply_chunk<NT>(sum, in_segment);
      if (EPILOGUE == SWIGLU && chunk == 0 && p.pair_weight) token_weight = p.pair_weight[token_row];
      bool segment_ends = ++in_segment == p.chunks;
      if (segment_ends) in_segment = 0;
      in_slice++;
      bool first_half_ends = in_slice == p.first_half_stages && in_slice != slice_chunks;
      bool slice_ends = in_slice == slice_chunks;
      if (!segment_ends && !first_half_ends && !slice_ends) continue;
      close<NT>(sum, base, half_open ? waiting_a() : nullptr);
      half_open = !first_half_ends && !slice_ends;
      if (half_open) {
        put<NT>(sum, waiting_a());
      } else if (first_half_ends) {
        put<NT>(sum, waiting_b());
      } else {
        if (p.first_half_stages < slice_chunks) add<NT>(sum, waiting_b());
        if (slice > 0) add<NT>(sum, waiting_a());
        in_slice = 0;
        if (++slice < p.slices) put<NT>(sum, waiting_a());
      }
    }
    leave_stage();
  }

  DEVICE void run() {
    if (tid == 0) {
      for (int s = 0; s < STAGES; s++) barrier_init(full(s), 1), barrier_init(empty(s), LEAVING);
      barriers_are_ready();
    }
    sync_threads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    items = (p.entries ? *p.num_entries : (p.num_rows + TOKENS - 1) / TOKENS) * p.tiles;
    if (tid >= THREADS) {
      give_registers<FEW ? 24 : 40>();
      if (tid == THREADS) copy_all();
    } else {
      take_registers<FEW ? 104 : 232>();
      multiply_all();
    }
  }

  DEVICE void multiply_all() {
    place = stage = parity = 0;
    next_item = blockIdx.x;
    aim();
    for (int s = 0; s < DEPTH; s++) fetch(s);
    read_ahead(0);
    Entry coming = {0, 0, 0, 0};  // loaded an item ahead
    if (blockIdx.x < items) coming = entry(blockIdx.x / p.tiles);
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      int tile = item % p.tiles;
      segment = tile / p.tiles_per_segment;
      in_segment_tile = tile - segment * p.tiles_per_segment;
      now = coming;
      int after = item + gridDim.x;
      if (after < items) coming = entry(after / p.tiles);
      int token = tid & 127, at = now.first + (token < now.count ? token : 0);
      token_row = p.pairs ? p.pairs[at] : at;
      token_weight = 1.0f;
      if constexpr (CODEC == NVFP4) {
        uint64_t slot = now.slot >= 0 && now.slot < p.num_slots ? now.slot : 0;
        uint32_t offset = p.parts[EPILOGUE == SWIGLU ? group : 0].bases;
        tensor_scale = *reinterpret_cast<const float*>(p.weights + slot * p.row_stride + offset);
      }
      float sum[VALUES];
      choose_shape(groups_of(now.count), sum);
      finish(sum);
    }
  }
  DEVICE void choose_shape(int groups, float* sum) {
    if (groups == 2) try_shape<2>(sum);
    if (groups == 4) try_shape<4>(sum);
    if (groups == 6) try_shape<6>(sum);
    if (groups == 8) try_shape<8>(sum);
    if (groups == 10) try_shape<10>(sum);
    if (groups == 11) try_shape<11>(sum);
    if (groups == 12) try_shape<12>(sum);
    if (groups == 13) try_shape<13>(sum);
    if (groups == 14) try_shape<14>(sum);
    if (groups == 16) try_shape<16>(sum);
  }
  template <int NT>
  DEVICE void try_shape(float* sum) {
    if constexpr (compiled(NT)) multiply_item<NT>(sum);
  }

  DEVICE void finish(float* sum) {
    bool slot_valid = now.slot >= 0 && now.slot < p.num_slots;
    if (!slot_valid || now.count > 8 * MOST) {
      if (tid == 0) atomic_or(p.error, slot_valid ? INVALID_COUNT : INVALID_SLOT);
      trap_in_debug();
      if (now.count > 8 * MOST) now.count = 8 * MOST;
#pragma unroll
      for (int i = 0; i < VALUES; i++) sum[i] = bits_float(0x7FC00000u);
    }
    if constexpr (EPILOGUE == SWIGLU)
      finish_swiglu(sum);
    else if constexpr (EPILOGUE == STORE_F32)
      finish_floats(sum);
    else
      finish_store(sum);
  }

  // The rows of the tile's tokens for all of the warpgroup; the caller's next barrier makes them visible.
  DEVICE void share_rows() {
    int token = tid & 127;
    if (token < TOKENS) token_rows()[token] = token_row, token_weights()[token] = token_weight;
  }

  // Each warpgroup gives every other group of tokens to the other: gate meets up.
  DEVICE void finish_swiglu(const float* sum) {
    sync_named<THREADS>(3);  // what was given and staged last time has been taken
    share_rows();
    int groups = (now.count + 7) / 8;
    float *mine = given(group), *theirs = given(1 - group);
#pragma unroll
    for (int i = 0; i < VALUES / 2; i++) {
      int even = i / 4 * 8 + i % 4, odd = even + 4;
      if (i / 4 * 2 < groups) mine[i * 128] = group ? sum[even] : sum[odd];
    }
    sync_named<THREADS>(3);
#pragma unroll
    for (int n = 0; n < GROUPS / 2; n++) {
      if (2 * n + group >= groups) break;
      uint32_t packed[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float h[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int even = 8 * n + 2 * half + i;
          float own = group ? sum[even + 4] : sum[even], other = theirs[(4 * n + 2 * half + i) * 128];
          h[i] = swiglu_of(group ? other : own, group ? own : other, p.swiglu_limit);
          if (p.pair_weight) h[i] *= token_weights()[16 * n + 8 * group + 2 * (lane & 3) + i];
        }
        packed[half] = to_bf16(h[0]) | static_cast<uint32_t>(to_bf16(h[1])) << 16;
      }
      stage_results(8 * n, packed);
    }
    sync_warpgroup(group);
    int first = in_segment_tile * 64;
    write_out(segment * p.columns + first, p.columns - first, [&](int place) { return place / 8 * 16 + 8 * group + place % 8; });
  }

  DEVICE void finish_store(const float* sum) {
    sync_warpgroup(group);  // what waited in place of the results has been taken
    share_rows();
    int groups = (now.count + 7) / 8;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
      if (n >= groups) break;
      uint32_t packed[2];
#pragma unroll
      for (int half = 0; half < 2; half++)
        packed[half] = to_bf16(sum[4 * n + 2 * half]) | static_cast<uint32_t>(to_bf16(sum[4 * n + 2 * half + 1])) << 16;
      stage_results(8 * n, packed);
    }
    sync_warpgroup(group);
    int first = in_segment_tile * 128 + group * 64;
    write_out(first, p.columns - first, [](int place) { return place; });
    sync_warpgroup(group);  // the next item's sums wait here
  }

  // As they are; eight lanes write what the memory takes at once.
  DEVICE void finish_floats(const float* sum) {
    sync_warpgroup(group);
    share_rows();
    sync_warpgroup(group);
    int first = row_tile(in_segment_tile) * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      int token = i / 4 * 8 + 2 * (lane & 3) + (i & 1), column = first + 8 * (i >> 1 & 1);
      if (token < now.count && column < p.columns)
        static_cast<float*>(p.out)[uint64_t(token_rows()[token]) * p.ld_out + column] = sum[i];
    }
    sync_warpgroup(group);
  }

  // Sixteen columns of eight tokens, from place `first` of the staged tokens on.
  DEVICE void stage_results(int first, const uint32_t* packed) {
    uint16_t* to = staged() + (first + (lane & 7)) * STAGED_COLUMNS + warp * 16 + (lane >> 3 & 1) * 8;
    store_transposed(to, packed[0], packed[1]);
  }

  // The staged tokens, 64 columns each, to their rows. token_of: the token at a place.
  template <typename F>
  DEVICE void write_out(int first_column, int columns, F token_of) const {
    bool whole = (p.ld_out & 7) == 0 && (first_column & 7) == 0;
    for (int i = tid & 127; i < TOKENS * 8; i += 128) {
      int token = token_of(i >> 3), column = (i & 7) * 8;
      if (token >= now.count) break;
      if (column >= columns) continue;
      const uint16_t* from = staged() + (i >> 3) * STAGED_COLUMNS + column;
      uint16_t* to = static_cast<uint16_t*>(p.out) + uint64_t(token_rows()[token]) * p.ld_out + first_column + column;
      if (whole && column + 8 <= columns) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int j = 0; j < 8 && column + j < columns; j++) to[j] = from[j];
      }
    }
  }
};
