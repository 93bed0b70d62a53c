// Instances of the prefill GEMM. Shared memory decides the tile: 128 tokens on sm_90a, 64 on sm_120a.
#include "prefill_gemm.cuh"

#if MOET_SM == 90
constexpr int GROUPS = 16, DEPTH = 4, DEPTH_FP4 = 3;
#else
constexpr int GROUPS = 8, DEPTH = 2, DEPTH_FP4 = 2;
#endif

#define PREFILL(name, codec, epilogue, depth)                 \
  KERNEL(PREFILL_THREADS, 1) name(GRID_CONSTANT StreamArgs args) {    \
    PrefillGemm<codec, GROUPS, epilogue, depth>(args).run();  \
  }                                                           \
  LAUNCHABLE(name, StreamArgs, PREFILL_THREADS)

PREFILL(prefill_w2_swiglu, W2, SWIGLU, DEPTH)
PREFILL(prefill_w2_bf16, W2, STORE_BF16, DEPTH)
PREFILL(prefill_mxfp4_swiglu, MXFP4, SWIGLU, DEPTH_FP4)
PREFILL(prefill_mxfp4_bf16, MXFP4, STORE_BF16, DEPTH_FP4)
PREFILL(prefill_fp8_bf16, FP8, STORE_BF16, DEPTH_FP4)
PREFILL(prefill_fp8_swiglu, FP8, SWIGLU, DEPTH_FP4)
PREFILL(prefill_bf16_bf16, BF16, STORE_BF16, DEPTH_FP4)
