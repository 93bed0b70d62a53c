// Activations cut into tiles, and instances of the prefill GEMM. Shared memory decides the tile: 128
// tokens on sm_90a, 64 on sm_120a.
#include "chunk_plan.cuh"
#include "prefill_gemm.cuh"

struct TileArgs {
  const uint16_t* x;     // [rows, k] bf16
  uint8_t* tiles;        // [entry, chunk]: scales of the tokens (e4m3), [token group, 16-byte block, token, 16]
  const Entry* entries;  // null: entry e is rows e * tokens ..
  const int* num_entries;
  const int* pairs;
  int num_rows, x_divisor, k, ld_x, chunks, tokens;
};

// Chunks of a tile, 128 bytes of each of its tokens in a chunk, as a shared-memory operand lies. A warp
// takes eight tokens in a chunk: eight lanes the tokens, four lanes the 32-byte blocks of a token. FP8: 128
// columns with one scale; else 64 bf16. Groups of eight without a token are left as they are.
constexpr int CHUNKS_AT_ONCE = 4;
template <bool SCALED>
DEVICE void lay_chunks(const TileArgs& p, int e, int first_chunk) {
  Entry t = {0, 0, e * p.tokens, p.num_rows - e * p.tokens};
  if (p.entries) t = p.entries[e];
  int lane = threadIdx.x & 31, block = lane >> 3;
  int groups = ((t.count < p.tokens ? t.count : p.tokens) + 7) / 8;
  for (int part = threadIdx.x >> 5; part < groups * CHUNKS_AT_ONCE; part += 8) {
    int chunk = first_chunk + part % CHUNKS_AT_ONCE, first = part / CHUNKS_AT_ONCE * 8;
    if (chunk >= p.chunks) continue;
    uint8_t* stage = p.tiles + (uint64_t(e) * p.chunks + chunk) * stage_bytes(p.tokens, SCALED);
    int token = first + (lane & 7);
    int column = chunk * (SCALED ? 128 : 64) + block * (SCALED ? 32 : 16);
    bool valid = token < t.count && column < p.k;
    int row = 0;
    if (valid) row = (p.pairs ? p.pairs[t.first + token] : t.first + token) / p.x_divisor;
    const uint16_t* from = p.x + uint64_t(row) * p.ld_x + (valid ? column : 0);
    uint4 a, b;
    uint8_t* to = stage + piece_of_token(token) + 2 * block * PIECE_BYTES;
    if constexpr (SCALED) {
      uint32_t words[16];
      load_bf16x32(from, valid, words);
      float amax = largest_of(words);
      amax = larger(amax, shuffle_xor(amax, 8));
      amax = larger(amax, shuffle_xor(amax, 16));
      int exponent = activation_exponent(amax);
      quantise_words(words, power_of_two(-exponent), a, b);
      if (block == 0) reinterpret_cast<float*>(stage)[token] = power_of_two(exponent);
      to += scale_bytes(p.tokens, true);
    } else {
      uint4 u = {0, 0, 0, 0}, v = u;
      if (valid) u = reinterpret_cast<const uint4*>(from)[0], v = reinterpret_cast<const uint4*>(from)[1];
      a = {u.x, u.z, v.x, v.z};
      b = {u.y, u.w, v.y, v.w};
    }
    *reinterpret_cast<uint4*>(to) = a;
    *reinterpret_cast<uint4*>(to + PIECE_BYTES) = b;
  }
}

template <bool SCALED>
DEVICE void lay_all(const TileArgs& p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int entries = p.entries ? *p.num_entries : (p.num_rows + p.tokens - 1) / p.tokens;
  int parts = (p.chunks + CHUNKS_AT_ONCE - 1) / CHUNKS_AT_ONCE;
  for (int i = blockIdx.x; i < entries * parts; i += gridDim.x)
    lay_chunks<SCALED>(p, i / parts, i % parts * CHUNKS_AT_ONCE);
}
KERNEL(256, 4) lay_tiles_fp8(GRID_CONSTANT TileArgs p) { lay_all<true>(p); }
LAUNCHABLE(lay_tiles_fp8, TileArgs, 256)
KERNEL(256, 4) lay_tiles_bf16(GRID_CONSTANT TileArgs p) { lay_all<false>(p); }
LAUNCHABLE(lay_tiles_bf16, TileArgs, 256)

KERNEL(CHUNK_PLAN_THREADS, 1) plan_chunk(GRID_CONSTANT ChunkPlanArgs args) { ChunkPlan(args).run(); }
LAUNCHABLE(plan_chunk, ChunkPlanArgs, CHUNK_PLAN_THREADS)

// Stages of tokens and places of weights, on sm_90a and on sm_120a.
#define PREFILL(name, codec, epilogue, stages_90, depth_90, stages_120, depth_120)               \
  KERNEL(PREFILL_THREADS, 1) name(GRID_CONSTANT StreamArgs args) {                               \
    PrefillGemm<codec, MOET_SM == 90 ? 16 : 8, epilogue, MOET_SM == 90 ? stages_90 : stages_120, \
                MOET_SM == 90 ? depth_90 : depth_120>(args)                                      \
        .run();                                                                                  \
  }                                                                                              \
  LAUNCHABLE(name, StreamArgs, PREFILL_THREADS)

PREFILL(prefill_w2_swiglu, W2, SWIGLU, 4, 6, 2, 3)
PREFILL(prefill_w2_bf16, W2, STORE_BF16, 4, 5, 2, 2)
PREFILL(prefill_mxfp4_swiglu, MXFP4, SWIGLU, 3, 4, 2, 2)
PREFILL(prefill_mxfp4_bf16, MXFP4, STORE_BF16, 3, 4, 2, 2)
PREFILL(prefill_nvfp4_swiglu, NVFP4, SWIGLU, 3, 4, 2, 2)
PREFILL(prefill_nvfp4_bf16, NVFP4, STORE_BF16, 3, 4, 2, 2)
PREFILL(prefill_fp8_swiglu, FP8, SWIGLU, 3, 3, 2, 0)
PREFILL(prefill_fp8_bf16, FP8, STORE_BF16, 3, 3, 3, 0)
PREFILL(prefill_bf16_bf16, BF16, STORE_BF16, 3, 3, 3, 0)
PREFILL(prefill_fp8_f32, FP8, STORE_F32, 3, 3, 3, 0)
PREFILL(prefill_bf16_f32, BF16, STORE_F32, 3, 3, 3, 0)

#if MOET_SM == 90  // narrow tiles, for experts with few tokens and matrices with few rows
KERNEL(PREFILL_THREADS, 2) prefill_w2_swiglu_few(GRID_CONSTANT StreamArgs args) {
  PrefillGemm<W2, 4, SWIGLU, 4, 8>(args).run();
}
LAUNCHABLE(prefill_w2_swiglu_few, StreamArgs, PREFILL_THREADS)
KERNEL(PREFILL_THREADS, 2) prefill_w2_bf16_few(GRID_CONSTANT StreamArgs args) {
  PrefillGemm<W2, 4, STORE_BF16, 4, 7>(args).run();
}
LAUNCHABLE(prefill_w2_bf16_few, StreamArgs, PREFILL_THREADS)
KERNEL(PREFILL_THREADS, 2) prefill_bf16_f32_few(GRID_CONSTANT StreamArgs args) {
  PrefillGemm<BF16, 4, STORE_F32, 3, 3>(args).run();
}
LAUNCHABLE(prefill_bf16_f32_few, StreamArgs, PREFILL_THREADS)
#endif
