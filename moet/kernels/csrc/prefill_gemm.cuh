// GEMM for many rows on the planes of the streaming GEMM: a CTA computes 128 weight rows of one tile of
// up to 8 NT tokens. Weights are decoded once per tile in registers and meet all its tokens. The tokens
// come as tiles laid out for the matrix units (csrc/moe.cu, tile_rows); a warp of its own has the copy
// engine fill a ring of stages, so the two warpgroups never wait for each other.
//
// The sum of a row has the very order of stream_gemm.cuh (segments, halves, slices), so that a token's
// result has the same bits whether it was prefilled or decoded, and whatever else was in its tile.
// Partial sums that wait for their turn lie in shared memory, private to their thread.
#pragma once
#include "stream_gemm.cuh"

constexpr int PREFILL_THREADS = 384;  // two warpgroups that multiply, one whose first warp copies

template <int CODEC, int NT, int EPILOGUE, int STAGES>
struct PrefillGemm {
  static constexpr int TOKENS = 8 * NT;
  static constexpr int WORDS = chunk_bytes(CODEC) / 512;
  static constexpr bool SCALED = CODEC != BF16;
  static constexpr bool PLANE = has_scale_plane(CODEC);
  // A stage: tokens, codes, token scales. The weights' scales are few: lanes load them a step ahead,
  // since every copy costs the engine about the same, however small.
  static constexpr int ACTIVATION_BYTES = TOKENS * 128;
  static constexpr int CODE_BYTES = chunk_bytes(CODEC);  // of a warp
  static constexpr int TOKEN_SCALE_AT = ACTIVATION_BYTES + 8 * CODE_BYTES;
  static constexpr int STAGE_BYTES = TOKEN_SCALE_AT + (SCALED ? TOKENS * 4 : 0);
  static constexpr int VALUES = 4 * NT;  // accumulators of a thread

  const StreamArgs& p;
  int tid, lane, warp, group, total_chunks, items;

  DEVICE PrefillGemm(const StreamArgs& args) : p(args) {
    tid = threadIdx.x;
    lane = tid & 31;
    int uniform = shuffle(tid >> 5, 0);
    warp = uniform & 3;
    group = uniform >> 2;
    total_chunks = p.segments * p.chunks;
  }

  // A stage's barriers: its bytes are here; its eight warps are done with them.
  DEVICE static uint64_t* full(int stage) { return reinterpret_cast<uint64_t*>(dynamic_shared()) + stage; }
  DEVICE static uint64_t* empty(int stage) { return full(STAGES + stage); }
  DEVICE static uint8_t* ring(int stage) { return dynamic_shared() + 128 + stage * STAGE_BYTES; }
  // Places of this thread, THREADS floats apart. Those of a are there if segments or slices are several.
  DEVICE float* waiting_b() const { return reinterpret_cast<float*>(ring(STAGES)) + tid; }
  DEVICE float* waiting_a() const { return waiting_b() + VALUES * THREADS; }

  DEVICE Entry entry(int e) const {
    if (p.entries) return p.entries[e];
    int first = e * TOKENS, left = p.num_rows - first;
    return {0, 0, first, left < TOKENS ? left : TOKENS};
  }
  DEVICE int place_row(int place) const { return p.pairs ? p.pairs[place] : place; }
  DEVICE int base_row() const { return (lane >> 2) + 8 * (lane & 1); }
  // SWIGLU: warpgroup 0 takes 64 gate rows, warpgroup 1 the same rows of up. w: 0..7.
  DEVICE static int row_tile(int in_segment, int w) {
    return EPILOGUE == SWIGLU ? in_segment * 4 + (w & 3) : in_segment * 8 + w;
  }

  // The copying warp: lane w < 8 brings what warp w multiplies, lane 8 the tokens.
  DEVICE void copy_all() {
    int place = 0, parity = 1;  // a new barrier's phase before the first counts as ended
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      int e = item / p.tiles, tile = item - e * p.tiles;
      int segment = tile / p.tiles_per_segment, in_segment = tile - segment * p.tiles_per_segment;
      Entry t = entry(e);
      if (t.slot < 0 || t.slot >= p.num_slots) t.slot = t.expert = 0;
      const Part& part = p.parts[EPILOGUE == SWIGLU ? lane >> 2 & 1 : 0];
      int at = row_tile(in_segment, lane & 7);
      if (at * 16 >= p.padded_rows) at = 0;  // past the last row: computed, not stored
      const uint8_t* row = p.weights + t.slot * p.row_stride + segment * uint64_t(p.segment_stride);
      const uint8_t* codes = row + part.codes + uint64_t(at) * (p.chunks * CODE_BYTES);
      const uint8_t* tokens = static_cast<const uint8_t*>(p.x) + uint64_t(e) * total_chunks * ACTIVATION_BYTES;
      const float* token_scales = p.x_scale + uint64_t(e) * total_chunks * TOKENS;
      int in_weights = 0;
      for (int chunk = 0; chunk < total_chunks; chunk++) {
        barrier_wait(empty(place), parity);
        uint8_t* stage = ring(place);
        if (lane == 0) barrier_arrive_expecting(full(place), STAGE_BYTES);
        sync_warp();
        if (lane < 8) {
          copy_bulk(stage + ACTIVATION_BYTES + lane * CODE_BYTES, codes, CODE_BYTES, full(place));
        } else if (lane == 8) {
          copy_bulk(stage, tokens, ACTIVATION_BYTES, full(place));
          if constexpr (SCALED) copy_bulk(stage + TOKEN_SCALE_AT, token_scales, TOKENS * 4, full(place));
        }
        tokens += ACTIVATION_BYTES;
        token_scales += TOKENS;
        codes += CODE_BYTES;
        if (++in_weights == p.chunks) {
          in_weights = 0;
          codes += uint64_t(p.segment_stride) - uint64_t(p.chunks) * CODE_BYTES;
        }
        if (++place == STAGES) place = 0, parity ^= 1;
      }
    }
  }

  // What a lane knows of its weights' scales, now and next: the word of two chunks (FP8: the block scale of
  // one), and the base of its row in a segment.
  struct WeightScales {
    const uint8_t *words, *bases;
    uint32_t word, base, next_word, next_base;
  };
  DEVICE static uint32_t load_word(const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); }

  DEVICE void open_scales(const Entry& entry, int segment, int in_segment, WeightScales& s) const {
    Entry t = entry;
    if (t.slot < 0 || t.slot >= p.num_slots) t.slot = t.expert = 0;
    const Part& part = p.parts[EPILOGUE == SWIGLU ? group : 0];
    int at = row_tile(in_segment, group * 4 + warp);
    if (at * 16 >= p.padded_rows) at = 0;
    const uint8_t* bases = p.bases + t.expert * p.base_stride + segment * p.base_segment_stride + part.bases;
    s.word = s.base = 0;
    if constexpr (PLANE) {
      s.words = p.weights + t.slot * p.row_stride + segment * uint64_t(p.segment_stride) + part.scales +
                at * ((p.chunks + 1) / 2 * 128) + lane * 4;
      s.bases = bases + at * 16 + base_row();
      s.next_word = load_word(s.words);
      s.next_base = *s.bases;
    } else if constexpr (CODEC == FP8) {
      s.words = bases + at / 8 * (p.chunks * 4);
      s.next_word = load_word(s.words);
    }
  }
  // Steps to a chunk's scales and loads those after them.
  DEVICE void step_scales(int chunk, int in_segment, WeightScales& s) const {
    if constexpr (PLANE) {
      if (in_segment == 0) {
        s.base = s.next_base;
        s.bases += p.base_segment_stride;
        if (chunk + p.chunks < total_chunks) s.next_base = *s.bases;
      }
      if (in_segment % 2 == 0) {
        s.word = s.next_word;
        bool same_segment = in_segment + 2 < p.chunks;
        s.words += same_segment ? 128 : p.segment_stride - in_segment / 2 * 128;
        if (same_segment || chunk + p.chunks - in_segment < total_chunks) s.next_word = load_word(s.words);
      }
    } else if constexpr (CODEC == FP8) {
      s.word = s.next_word;
      s.words += 4;
      if (chunk + 1 < total_chunks) s.next_word = load_word(s.words);
    }
  }

  // Multiplies a stage's weights with its tokens and adds the result, scaled, to sum.
  DEVICE void consume(uint8_t* stage, int in_segment, float* sum, const WeightScales& now) {
    const int w = group * 4 + warp;
    const uint8_t* from = stage + ACTIVATION_BYTES + w * CODE_BYTES + lane * 16;
    uint32_t codes_words[4 * WORDS], a[4][4];
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      uint4 v = *reinterpret_cast<const uint4*>(from + i * 512);
      codes_words[4 * i] = v.x, codes_words[4 * i + 1] = v.y;
      codes_words[4 * i + 2] = v.z, codes_words[4 * i + 3] = v.w;
    }
    RowScale scale = {0, 0, 0};
    float weight_scale = 1.0f;
    if constexpr (PLANE) {
      scale.lane = now.word;
#if MOET_SM == 90
      uint32_t exponents = saturating_subtract(now.word, now.base * 0x01010101u) << 2;
      int quad = (lane & ~3) + 2 * (in_segment & 1);
      scale.word0 = shuffle(exponents, quad);
      scale.word1 = shuffle(exponents, quad + 1);
#endif
    } else if constexpr (CODEC == FP8) {
      weight_scale = bits_float(now.word);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) decode_block<CODEC>(codes_words, j, scale, p.masks, a[j]);
    float part[VALUES];
    BOperand b = b_operand(stage, 1024);
    mma_begin();
#if MOET_SM == 120
    if (in_segment & 1)
      chunk_mma<CODEC, NT, 1>(part, a, b, scale);
    else
#endif
      chunk_mma<CODEC, NT, 0>(part, a, b, scale);
    mma_commit();
    mma_wait<0>();
    const float* s = reinterpret_cast<const float*>(stage + TOKEN_SCALE_AT) + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if constexpr (SCALED) {
        float s0 = s[8 * n], s1 = s[8 * n + 1];
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

  // Sum times the rows' factor, plus what waits at `with`, if it does.
  DEVICE void close(float* sum, uint32_t base, const float* with) const {
    float f0 = row_factor<CODEC>(base), f1 = f0;
#if MOET_SM == 90
    if constexpr (PLANE) {
      f0 = row_factor<CODEC>(shuffle(base, lane & ~3));
      f1 = row_factor<CODEC>(shuffle(base, (lane & ~3) + 1));
    }
#endif
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      float v = sum[i] * (i % 4 < 2 ? f0 : f1);
      sum[i] = with ? with[i * THREADS] + v : v;
    }
  }
  DEVICE static void add(float* sum, const float* waiting) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) sum[i] = waiting[i * THREADS] + sum[i];
  }
  DEVICE static void put(float* sum, float* waiting) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      waiting[i * THREADS] = sum[i];
      sum[i] = 0.0f;
    }
  }

  DEVICE void run() {
    if (tid == 0) {
      for (int s = 0; s < STAGES; s++) barrier_init(full(s), 1), barrier_init(empty(s), 8);
      barriers_are_ready();
    }
    sync_threads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    items = (p.entries ? *p.num_entries : (p.num_rows + TOKENS - 1) / TOKENS) * p.tiles;
    if (tid >= THREADS) {
      give_registers<40>();
      if (tid < THREADS + 32) copy_all();
    } else {
      take_registers<232>();
      multiply_all();
    }
  }

  DEVICE void multiply_all() {
    int place = 0, parity = 0;
    int slice_chunks = total_chunks / p.slices;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      float sum[VALUES];
#pragma unroll
      for (int i = 0; i < VALUES; i++) sum[i] = 0.0f;
      WeightScales scales;
      {
        int e = item / p.tiles, tile = item - e * p.tiles, segment = tile / p.tiles_per_segment;
        open_scales(entry(e), segment, tile - segment * p.tiles_per_segment, scales);
      }
      int in_segment = 0, in_slice = 0, slice = 0;
      bool half_open = false;  // waiting_a holds earlier segments of this half
#pragma unroll 1
      for (int chunk = 0; chunk < total_chunks; chunk++) {
        step_scales(chunk, in_segment, scales);
        barrier_wait(full(place), parity);
        consume(ring(place), in_segment, sum, scales);
        sync_warp();
        if (lane == 0) barrier_arrive(empty(place));
        if (++place == STAGES) place = 0, parity ^= 1;
        bool segment_ends = ++in_segment == p.chunks;
        if (segment_ends) in_segment = 0;
        in_slice++;
        bool first_half_ends = in_slice == p.first_half_stages && in_slice != slice_chunks;
        bool slice_ends = in_slice == slice_chunks;
        if (!segment_ends && !first_half_ends && !slice_ends) continue;
        close(sum, scales.base, half_open ? waiting_a() : nullptr);
        half_open = !first_half_ends && !slice_ends;
        if (half_open) {
          put(sum, waiting_a());
        } else if (first_half_ends) {
          put(sum, waiting_b());
        } else {
          if (p.first_half_stages < slice_chunks) add(sum, waiting_b());
          if (slice > 0) add(sum, waiting_a());
          in_slice = 0;
          if (++slice < p.slices) put(sum, waiting_a());
        }
      }
      finish(item, sum);
    }
  }

  DEVICE void finish(int item, float* sum) {
    int e = item / p.tiles, tile = item - e * p.tiles;
    int segment = tile / p.tiles_per_segment, in_segment = tile - segment * p.tiles_per_segment;
    Entry t = entry(e);
    bool slot_valid = t.slot >= 0 && t.slot < p.num_slots;
    if (!slot_valid || t.count > TOKENS) {
      if (tid == 0) atomic_or(p.error, slot_valid ? INVALID_COUNT : INVALID_SLOT);
      trap_in_debug();
      if (t.count > TOKENS) t.count = TOKENS;
#pragma unroll
      for (int i = 0; i < VALUES; i++) sum[i] = bits_float(0x7FC00000u);
    }
    if constexpr (EPILOGUE == SWIGLU) {
      // Each warpgroup gives half of its tokens to the other: gate meets up. Nothing waits now.
      constexpr int HALF = VALUES / 2;
      float* mine = waiting_b() - tid + (tid & 127) + group * HALF * 128;
      const float* theirs = waiting_b() - tid + (tid & 127) + (1 - group) * HALF * 128;
      sync_named<THREADS>(3);  // what waited there has been taken
#pragma unroll
      for (int i = 0; i < HALF; i++) mine[i * 128] = group ? sum[i] : sum[HALF + i];
      sync_named<THREADS>(3);
#pragma unroll
      for (int i = 0; i < HALF; i++) {
        float own = group ? sum[HALF + i] : sum[i], other = theirs[i * 128];
        float h = swiglu_of(group ? other : own, group ? own : other, p.swiglu_limit);
        int token = 8 * ((group ? NT / 2 : 0) + i / 4) + 2 * (lane & 3) + (i & 1);
        int column = in_segment * 64 + warp * 16 + (lane >> 2) + 8 * (i >> 1 & 1);
        if (token < t.count && column < p.columns) {
          int row = place_row(t.first + token);
          if (p.pair_weight) h *= p.pair_weight[row];
          static_cast<uint16_t*>(p.out)[uint64_t(row) * p.ld_out + segment * p.columns + column] = to_bf16(h);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        int token = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
        int column = row_tile(in_segment, group * 4 + warp) * 16 + (lane >> 2) + 8 * (i >> 1 & 1);
        if (token < t.count && column < p.columns)
          static_cast<uint16_t*>(p.out)[uint64_t(place_row(t.first + token)) * p.ld_out + column] = to_bf16(sum[i]);
      }
    }
  }
};
