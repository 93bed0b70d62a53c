// A decode step's experts in one launch: gate and up, SwiGLU, down, and the weighted sum, of up to
// eight tokens, routed experts (of two formats) and the shared one alike.
//
// All tokens are columns of every product, and an entry's choices say which columns count: a matrix
// instruction has room for eight anyway, so activations are loaded once. Items of 64 weight rows
// are dealt out in turn: gate and up of the shared expert, of the routed ones, then the same for
// down. Each lane streams its own words through a private ring that runs ahead over items, so that
// weights flow while a CTA waits for hidden values of others. The sums have the order of
// stream_gemm.cuh, so a row has the same bits there. Does not know who routed, nor which slots hold what.
#pragma once
#include "grid_sync.cuh"
#include "choose.cuh"

constexpr int NOT_CHOSEN = 0xFF;
constexpr int SHARED_SOURCE = 2;
constexpr uint32_t HIDDEN_MISSING = 4;  // beside ErrorBit: another CTA never brought its values

// One format's weights: expert rows of a pool, or the shared expert.
struct Source {
  const uint8_t* rows[2];   // of gate and up, of down
  const uint8_t* bases[2];  // W2, MXFP4: row bases; FP8: fp32 scales of 128 x 128 blocks
  uint64_t row_stride, base_stride;
  uint32_t segment_stride, base_segment_stride;
  Part parts[3];         // gate, up, down. NVFP4: `bases` is the place of the tensor scale in a segment
  int codec, num_slots;
  int up_half, down_half;            // where the sums are halved, in stages
  int down_segments, down_chunks;    // sub-rows that down sums, and their chunks
  int up_tiles_per_segment, up_columns;  // items and outputs in a sub-row
};

struct MoeArgs {
  const uint16_t* x;        // [tokens, k] bf16, or
  const uint8_t* x_codes;   // [tokens, k] e4m3 in MMA order with
  const float* x_scale;     // [tokens, k / 128]
  uint16_t* hidden;         // [tokens, top_k + 1, intermediate]
  uint16_t* parts;          // [tokens, top_k + 1, dim]
  void* out;                // [tokens, dim]
  const Chosen* chosen;
  const uint32_t* num_chosen;
  const int64_t* expert_ids;   // [tokens, top_k]; a first one below 0: the token has no expert
  const float* weights;        // [tokens, top_k]
  uint32_t* counters;          // per chosen expert and shared, then per 16 outputs; zero at the start
  uint32_t* error;
  Source sources[3];        // of the routed experts two, then the shared one
  int tokens, top_k, k, x_chunks, intermediate, dim;
  int max_chosen;           // hidden-value counters before those of the outputs
  int up_tiles, down_tiles; // items of an expert
  int has_shared, weigh_output, bf16;  // bf16: the dtype of out, else fp32
  float swiglu_limit;
  Masks masks;
};

template <int CODEC>
struct StageOf {
  static constexpr int CHUNKS = CODEC == W2 ? 4 : CODEC == FP8 ? 1 : 2;
  static constexpr int WORDS = 4 / CHUNKS;  // uint4 of a lane in a chunk
};
DEVICE int chunks_of_stage(int codec) { return codec == W2 ? 4 : codec == FP8 ? 1 : 2; }
constexpr int STAGE_BYTES = 4 * 16 + 3 * 4;  // of a lane: codes, two scale words, a base

// CODECS: a bit for each codec that may come. OVERLAP: two chunks are in the matrix units at once.
template <int CODECS, int STAGES, bool OVERLAP>
struct MoeDecode {
  const MoeArgs& p;
  uint8_t* activations;
  uint8_t* x_scales;   // exponents of powers of two, biased: [chunk][token]
  float* reduction;
  uint8_t* ring;
  int tid, lane, warp, group;
  bool planned;        // the work list is known
  int num_chosen, parity;

  struct Item {
    bool exists, down;
    int source, entry, tile, slot, expert;
    uint64_t choices;
  };

  // The producer's place.
  int next_item;
  bool live;
  int stage, end_stage, in_segment, stages_per_segment, chunks, codec;
  uint32_t segment_stride, base_segment_stride;
  const uint8_t *codes, *scales, *bases;

  DEVICE MoeDecode(const MoeArgs& args) : p(args) {
    tid = threadIdx.x;
    lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);
    warp = uniform & 3;
    group = uniform >> 2;
    int most = shared_chunks();
    activations = dynamic_shared();
    ring = activations + most * 1024;
    reduction = reinterpret_cast<float*>(ring + STAGES * STAGE_BYTES * THREADS);
    x_scales = reinterpret_cast<uint8_t*>(reduction + 2 * 4 * 128);
    planned = false;
    parity = 0;
  }
  DEVICE int shared_chunks() const {
    int down = 0;
#pragma unroll
    for (int s = 0; s < 3; s++) {
      int cps = chunks_of_stage(p.sources[s].codec);
      int n = p.sources[s].down_segments * ((p.sources[s].down_chunks + cps - 1) / cps * cps);
      down = n > down ? n : down;
    }
    int up = (p.x_chunks + 3) / 4 * 4;
    return up > down ? up : down;
  }

  // ---- items
  DEVICE void see_plan() {
    if (planned) return;
    planned = true;
    wait_for_previous_kernel();
    num_chosen = load_fresh(p.num_chosen);
  }
  DEVICE Item item_at(int i) {
    Item t;
    t.exists = true;
    t.source = SHARED_SOURCE, t.entry = p.max_chosen - 1, t.slot = t.expert = 0;
    t.choices = 0x0101010101010101u * p.top_k;
    int shared_up = p.has_shared ? p.up_tiles : 0, shared_down = p.has_shared ? p.down_tiles : 0;
    t.down = false, t.tile = i;
    if (i < shared_up) return t;
    see_plan();
    int routed_up = num_chosen * p.up_tiles, tiles = p.up_tiles;
    i -= shared_up;
    if (i >= routed_up) {
      i -= routed_up, t.down = true, tiles = p.down_tiles, t.tile = i;
      if (i < shared_down) return t;
      i -= shared_down;
      t.exists = i < num_chosen * p.down_tiles;
      if (!t.exists) return t;
    }
    t.entry = i / tiles, t.tile = i - t.entry * tiles;
    uint4 c = load_fresh(reinterpret_cast<const uint4*>(p.chosen + t.entry));
    t.slot = static_cast<int>(c.x), t.expert = c.y & 0xFFFF, t.source = c.y >> 16 & 1;
    t.choices = c.z | static_cast<uint64_t>(c.w) << 32;
    return t;
  }
  DEVICE bool resident(const Item& t) const { return t.slot >= 0 && t.slot < p.sources[t.source].num_slots; }
  DEVICE int choice(const Item& t, int token) const { return static_cast<int>(t.choices >> (8 * token)) & 0xFF; }

  // ---- the producer
  DEVICE int base_row() const { return (lane >> 2) + 8 * (lane & 1); }
  DEVICE uint8_t* ring_stage(int place) const { return ring + place * (STAGE_BYTES * THREADS); }

  // Points the producer at its first stage of the next item that has one for this warpgroup.
  DEVICE void aim() {
#pragma unroll 1
    for (;;) {
      Item t = item_at(next_item);
      live = t.exists;
      if (!live) return;
      next_item += gridDim.x;
      const Source& s = p.sources[t.source];
      codec = s.codec;
      int cps = chunks_of_stage(codec);
      chunks = t.down ? s.down_chunks : p.x_chunks;
      stages_per_segment = (chunks + cps - 1) / cps;
      int stages = t.down ? s.down_segments * stages_per_segment : stages_per_segment;
      int half = t.down ? s.down_half : s.up_half;
      stage = group ? half : 0, end_stage = group ? stages : half;
      if (stage >= end_stage) continue;
      if (!resident(t)) t.slot = t.expert = 0;  // reported by the consumer
      int segment = stage / stages_per_segment;  // where the columns begin; that of the rows for up
      in_segment = stage - segment * stages_per_segment;
      int tile = t.tile, row_tile = tile * 4 + warp, matrix = 2;
      if (!t.down) {
        segment = tile / s.up_tiles_per_segment, tile -= segment * s.up_tiles_per_segment;
        // warps 0, 1 take 32 gate rows and warps 2, 3 the same rows of up
        row_tile = tile * 2 + (warp & 1), matrix = warp >> 1;
      }
      segment_stride = s.segment_stride, base_segment_stride = s.base_segment_stride;
      Part part = s.parts[0];
      if (matrix == 1) part = s.parts[1];
      if (matrix == 2) part = s.parts[2];
      const uint8_t* row = (t.down ? s.rows[1] : s.rows[0]) + uint64_t(t.slot) * s.row_stride + uint64_t(segment) * segment_stride;
      bases = (t.down ? s.bases[1] : s.bases[0]) + uint64_t(t.expert) * s.base_stride;
      int chunk = in_segment * cps, bytes = codec == W2 ? 512 : codec == FP8 ? 2048 : 1024;
      codes = row + part.codes + (uint64_t(row_tile) * chunks + chunk) * bytes + lane * 16;
      if (codec == FP8) {
        scales = bases + part.bases + (row_tile / 8 * chunks + chunk) * 4;
      } else if (codec == NVFP4) {
        scales = row + part.scales + (row_tile * chunks + chunk) * 128 + lane * 4;
      } else {
        scales = row + part.scales + (row_tile * ((chunks + 1) / 2) + chunk / 2) * 128 + lane * 4;
        bases += segment * base_segment_stride + part.bases + row_tile * 16 + base_row() / 4 * 4;
      }
      return;
    }
  }

  // Copies the producer's next stage into a place of the ring. Commits a group in any case.
  DEVICE void produce(int place) {
    if (live && stage == end_stage) aim();
    if (live) {
      uint8_t* to = ring_stage(place) + tid * 16;
      int cps = chunks_of_stage(codec), left = chunks - in_segment * cps;
#pragma unroll
      for (int i = 0; i < 4; i++) copy16(to + i * (16 * THREADS), codes + i * 512, i * cps < left * 4);
      codes += 2048;
      uint8_t* words = ring_stage(place) + 4 * 16 * THREADS + tid * 4;
      copy4(words, scales, true);
      if (codec == W2 || codec == NVFP4) {
        copy4(words + 4 * THREADS, scales + 128, codec == W2 ? left > 2 : left > 1);
        scales += 256;
      } else {
        scales += codec == FP8 ? 4 : 128;
      }
      if (codec == W2 || codec == MXFP4) copy4(words + 8 * THREADS, bases, true);
      if (++in_segment == stages_per_segment) next_segment();
      stage++;
    }
    commit_copies();
  }
  DEVICE void next_segment() {
    in_segment = 0;
    codes += uint64_t(segment_stride) - uint64_t(stages_per_segment) * 2048;
    bases += base_segment_stride;
    int step = codec == MXFP4 ? 128 : 256;
    scales += uint64_t(segment_stride) - uint64_t(stages_per_segment) * step;  // FP8 has one segment
  }

  // ---- activations
  // The B operand of an item into shared memory: the tokens' rows of x, as codes or as bf16 that is
  // rounded here, or the hidden values of the expert, once they are complete.
  DEVICE void load_activations(const Item& t) {
    const Source& s = p.sources[t.source];
    int segments = 1, in_chunks = p.x_chunks, cps = 4, k = p.k;
    const void* from = p.x_codes ? static_cast<const void*>(p.x_codes) : p.x;
    bool as_codes = p.x_codes && !t.down;
    if (t.down) {
      segments = s.down_segments, in_chunks = s.down_chunks, cps = chunks_of_stage(s.codec);
      k = p.intermediate, from = p.hidden;
      if (lane == 0 && !wait_until(p.counters + t.entry, 2 * p.up_tiles)) atomic_or(p.error, HIDDEN_MISSING);
      sync_warp();
    }
    int in_blocks = (in_chunks + cps - 1) / cps * cps * 4, blocks = segments * in_blocks;
#pragma unroll 1
    for (int i = tid; i < blocks * MAX_TOKENS; i += THREADS) {
      int token = i & 7, block = i >> 3, segment = segments == 1 ? 0 : block / in_blocks;
      int in = block - segment * in_blocks, column = (segment * in_chunks * 4 + in) * 32;
      int c = choice(t, token), row = t.down ? token * (p.top_k + 1) + c : token;
      bool valid = token < p.tokens && c != NOT_CHOSEN && in < in_chunks * 4 && column < k;
      uint64_t at = uint64_t(row) * k + column;
      uint4 a = {0, 0, 0, 0}, b = a;
      int exponent = 127;
      if (as_codes) {
        if (valid) {
          const uint4* q = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(from) + at);
          a = load_fresh(q), b = load_fresh(q + 1);
          exponent = float_bits(load_fresh(p.x_scale + row * ((k + 127) / 128) + column / 128)) >> 23;
        }
      } else {
        uint32_t words[16];
        const uint4* v = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + (valid ? at : 0));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          uint4 u = {0, 0, 0, 0};
          if (valid) u = load_fresh(v + j);
          words[4 * j] = u.x, words[4 * j + 1] = u.y, words[4 * j + 2] = u.z, words[4 * j + 3] = u.w;
        }
        float amax = largest_of(words);  // four lanes hold a row's 128 columns
        amax = larger(amax, shuffle_xor(amax, 8));
        amax = larger(amax, shuffle_xor(amax, 16));
        int e = activation_exponent(amax);
        quantise_words(words, power_of_two(-e), a, b);
        exponent = e + 127;
      }
      uint8_t* to = activations + block * 256 + token * 16;
      *reinterpret_cast<uint4*>(to) = a;
      *reinterpret_cast<uint4*>(to + 128) = b;
      if ((block & 3) == 0) x_scales[(block >> 2) * MAX_TOKENS + token] = static_cast<uint8_t>(exponent);
    }
    fence_shared_for_matrix_units();
    sync_threads();
  }

  // ---- the consumer
  DEVICE void fold(float* sum, const float* part, int chunk, float weight_scale) const {
    uint32_t e = *reinterpret_cast<const uint16_t*>(x_scales + chunk * MAX_TOKENS + 2 * (lane & 3));
    float s0 = bits_float((e & 0xFF) << 23) * weight_scale, s1 = bits_float(e >> 8 << 23) * weight_scale;
    sum[0] = fma_rn(part[0], s0, sum[0]);
    sum[1] = fma_rn(part[1], s1, sum[1]);
    sum[2] = fma_rn(part[2], s0, sum[2]);
    sum[3] = fma_rn(part[3], s1, sum[3]);
  }

  template <int CODEC>
  DEVICE void consume(int place, int chunk, float* sum, uint32_t& base) {
    constexpr int CPS = StageOf<CODEC>::CHUNKS, WORDS = StageOf<CODEC>::WORDS;
    constexpr int BUFFERS = OVERLAP && CPS > 1 ? 2 : 1;
    const uint8_t* from = ring_stage(place) + tid * 16;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(ring_stage(place) + 4 * 16 * THREADS) + tid;
    if constexpr (has_scale_plane(CODEC)) base = words[2 * THREADS] >> (8 * (base_row() & 3)) & 0xFF;
    uint32_t base4 = base * 0x01010101u;
    BOperand b = b_operand(activations + chunk * 1024, 0);
    uint32_t a[BUFFERS][4][4];
    float part[BUFFERS][4];
    uint32_t scale_word = 0, exponents = 0;
#pragma unroll
    for (int c = 0; c < CPS; c++) {
      uint32_t codes_words[4 * WORDS];
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        uint4 v = *reinterpret_cast<const uint4*>(from + (c * WORDS + i) * (16 * THREADS));
        codes_words[4 * i] = v.x, codes_words[4 * i + 1] = v.y;
        codes_words[4 * i + 2] = v.z, codes_words[4 * i + 3] = v.w;
      }
      if constexpr (CODEC == NVFP4) {
        nvfp4_chunk<false>(codes_words, words[c * THREADS], TableOf<NVFP4>(p.masks), b_advance(b, c * 1024), part[0]);
        fold(sum, part[0], chunk + c, 1.0f);
        continue;
      }
      RowScale scale = {0, 0, 0};
      float weight_scale = 1.0f;
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
        weight_scale = bits_float(words[0]);
      }
      constexpr int DECODE = CODEC == NVFP4 ? MXFP4 : CODEC;
#pragma unroll
      for (int j = 0; j < 4; j++) decode_block<DECODE>(codes_words, j, scale, p.masks, a[c % BUFFERS][j]);
      mma_begin();
      if (c & 1) chunk_mma<DECODE, 1, 1>(part[c % BUFFERS], a[c % BUFFERS], b_advance(b, c * 1024), scale);
      else chunk_mma<DECODE, 1, 0>(part[c % BUFFERS], a[c % BUFFERS], b_advance(b, c * 1024), scale);
      mma_commit();
      int done = c - (BUFFERS - 1);
      if (done >= 0) {
        mma_wait<BUFFERS - 1>();
        fold(sum, part[done % BUFFERS], chunk + done, weight_scale);
      }
    }
    if constexpr (BUFFERS > 1 && CODEC != NVFP4) {
      mma_wait<0>();
      fold(sum, part[(CPS - 1) % BUFFERS], chunk + CPS - 1, 1.0f);
    }
  }

  template <int CODEC>
  DEVICE void close(float* total, float* sum, uint32_t base, float tensor_scale) const {
    float f0 = tensor_scale, f1 = tensor_scale;
    if constexpr (has_scale_plane(CODEC)) {
      f0 = f1 = row_factor<CODEC>(base);
#if MOET_SM == 90
      f0 = row_factor<CODEC>(shuffle(base, lane & ~3));
      f1 = row_factor<CODEC>(shuffle(base, (lane & ~3) + 1));
#endif
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      total[i] = fma_rn(sum[i], i < 2 ? f0 : f1, total[i]);
      sum[i] = 0.0f;
    }
  }

  template <int CODEC>
  static constexpr bool HAS = CODECS >> CODEC & 1;

  // Fills the ring, or sums this warpgroup's half of an item's columns while the ring is refilled.
  DEVICE void stream(const Item& t, int& place, bool fills, float* total) {
    const Source& s = p.sources[t.source];
    int cps = chunks_of_stage(s.codec), in_chunks = t.down ? s.down_chunks : p.x_chunks;
    int per_segment = (in_chunks + cps - 1) / cps, from = 0, to = STAGES;
    if (!fills) {
      int stages = t.down ? s.down_segments * per_segment : per_segment, half = t.down ? s.down_half : s.up_half;
      from = group ? half : 0, to = group ? stages : half;
    }
    float sum[4] = {0, 0, 0, 0}, tensor_scale = 1.0f;
    if constexpr (HAS<NVFP4>) {
      Part part = t.down ? s.parts[2] : warp >> 1 ? s.parts[1] : s.parts[0];
      uint64_t row = resident(t) ? t.slot : 0;
      if (!fills && s.codec == NVFP4)
        tensor_scale = *reinterpret_cast<const float*>(s.rows[0] + row * s.row_stride + part.bases);
    }
    uint32_t base = 0;
    int to_close = per_segment - from % per_segment;
#pragma unroll 1
    for (int at = from; at < to; at++) {
      if (!fills) {
        wait_copies<STAGES - 1>();
        if (HAS<W2> && s.codec == W2) consume<W2>(place, at * 4, sum, base);
        if (HAS<MXFP4> && s.codec == MXFP4) consume<MXFP4>(place, at * 2, sum, base);
        if (HAS<NVFP4> && s.codec == NVFP4) consume<NVFP4>(place, at * 2, sum, base);
        if (HAS<FP8> && s.codec == FP8) consume<FP8>(place, at, sum, base);
      }
      produce(place);
      place = place + 1 == STAGES ? 0 : place + 1;
      if (!fills && (--to_close == 0 || at + 1 == to)) {
        if (HAS<W2> && s.codec == W2) close<W2>(total, sum, base, 1.0f);
        if (HAS<MXFP4> && s.codec == MXFP4) close<MXFP4>(total, sum, base, 1.0f);
        if (s.codec == FP8 || s.codec == NVFP4) close<FP8>(total, sum, base, tensor_scale);
        to_close = per_segment;
      }
    }
  }

  DEVICE void run() {
    let_next_kernel_start();
    next_item = blockIdx.x;
    live = true, stage = end_stage = 0;
    // Before the items two steps: weights of the shared expert need no plan, so a CTA that begins
    // with them fills its ring, then loads x; another one loads x while the plan is being made.
    const int fill = p.has_shared && blockIdx.x < unsigned(p.up_tiles) ? 0 : 1;
    int place = 0, i = blockIdx.x;
#pragma unroll 1
    for (int step = 0;; step++) {
      Item t;
      if (step < 2) {
        t.down = false, t.source = SHARED_SOURCE, t.slot = 0, t.choices = 0;
      } else {
        t = item_at(i);
        i += gridDim.x;
        if (!t.exists) break;
      }
      if (step == 1 - fill || t.down) load_activations(t);
      if (step == 1 - fill) continue;
      float total[4] = {0, 0, 0, 0};
      stream(t, place, step < 2, total);
      if (step >= 2) finish(t, total);
      parity ^= 1;
    }
    see_plan();
    if (num_chosen == 0 && !p.has_shared) store_nothing();
    wait_copies<0>();
  }

  DEVICE void finish(const Item& t, float* total) {
    if (!resident(t)) {
      if (tid == 0) atomic_or(p.error, INVALID_SLOT);
      trap_in_debug();
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] = bits_float(0x7FC00000u);
    }
    float* mine = reduction + parity * 512 + (tid & 127);
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < 4; i++) mine[i * 128] = total[i];
    }
    sync_threads();  // from here on the activations may be replaced, too
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] += mine[i * 128];
    if (t.down) {
      store_part(t, total);
      return;
    }
    // The up rows go from warps 2, 3 to warps 0, 1, through slots that only the sender has read.
    if (warp >= 2) {
#pragma unroll
      for (int i = 0; i < 4; i++) mine[i * 128] = total[i];
    }
    sync_named<128>(1);
    if (warp < 2) store_hidden(t, total, mine + 64);
  }

  DEVICE void store_hidden(const Item& t, const float* gate, const float* up) {
    const Source& s = p.sources[t.source];
    int segment = t.tile / s.up_tiles_per_segment, tile = t.tile - segment * s.up_tiles_per_segment;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = 2 * (lane & 3) + (i & 1), column = tile * 32 + warp * 16 + (lane >> 2) + 8 * (i >> 1);
      int c = choice(t, token);
      if (token >= p.tokens || c == NOT_CHOSEN || column >= s.up_columns) continue;
      float h = swiglu_of(gate[i], up[i * 128], p.swiglu_limit);
      if (!p.weigh_output && c < p.top_k) h *= load_fresh(p.weights + token * p.top_k + c);
      uint64_t row = uint64_t(token) * (p.top_k + 1) + c;
      p.hidden[row * p.intermediate + segment * s.up_columns + column] = to_bf16(h);
    }
    sync_warp();
    if (lane == 0) add_released(p.counters + t.entry, 1);
  }

  // Stores 16 outputs of the expert; the last expert to arrive there sums all of them.
  DEVICE void store_part(const Item& t, const float* total) {
    int first = t.tile * 64 + warp * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = 2 * (lane & 3) + (i & 1), column = first + (lane >> 2) + 8 * (i >> 1), c = choice(t, token);
      if (token >= p.tokens || c == NOT_CHOSEN || column >= p.dim) continue;
      p.parts[(uint64_t(token) * (p.top_k + 1) + c) * p.dim + column] = to_bf16(total[i]);
    }
    sync_warp();
    uint32_t before = 0;
    if (lane == 0) before = add_ordered(p.counters + p.max_chosen + t.tile * 4 + warp, 1);
    before = shuffle(before, 0);
    if (before + 1 == static_cast<uint32_t>(num_chosen + p.has_shared)) combine(first);
  }
  DEVICE void combine(int first) {
    for (int i = lane; i < p.tokens * 16; i += 32) {
      int token = i >> 4, column = first + (i & 15);
      if (column >= p.dim) continue;
      const uint16_t* from = p.parts + uint64_t(token) * (p.top_k + 1) * p.dim + column;
      float sum = 0.0f;
      uint32_t sign = load_fresh(reinterpret_cast<const uint32_t*>(p.expert_ids + token * p.top_k) + 1);
      if (!(sign >> 31)) {
        for (int c = 0; c < p.top_k; c++) {
          float w = p.weigh_output ? load_fresh(p.weights + token * p.top_k + c) : 1.0f;
          float v = bits_float(static_cast<uint32_t>(load_fresh(from + uint64_t(c) * p.dim)) << 16) * w;
          sum = c ? add_rn(sum, v) : v;
        }
      }
      if (p.has_shared)
        sum = add_rn(sum, bits_float(static_cast<uint32_t>(load_fresh(from + uint64_t(p.top_k) * p.dim)) << 16));
      store_out(token, column, sum);
    }
  }
  DEVICE void store_out(int token, int column, float v) {
    uint64_t at = uint64_t(token) * p.dim + column;
    if (p.bf16) static_cast<uint16_t*>(p.out)[at] = to_bf16(v);
    else static_cast<float*>(p.out)[at] = v;
  }
  DEVICE void store_nothing() {
    int total = p.tokens * p.dim;
    for (int i = blockIdx.x * THREADS + tid; i < total; i += gridDim.x * THREADS) store_out(i / p.dim, i % p.dim, 0.0f);
  }
};
