// Instances of the streaming GEMM. Suffix _wide: two CTAs an SM and a deeper ring, for many experts;
// the others keep three CTAs an SM, for few. Both give the same bits.
#include "stream_gemm.cuh"
#include "wide_tokens.cuh"

#define STREAM(name, codec, nt, epilogue, stages, quantise, overlap, ctas)             \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT StreamArgs args) {                          \
    StreamGemm<codec, nt, epilogue, stages, quantise, overlap>(args).run();            \
  }                                                                                    \
  LAUNCHABLE(name, StreamArgs, THREADS)

STREAM(stream_w2_n8_swiglu, W2, 1, SWIGLU, 2, false, false, 3)
STREAM(stream_w2_n8_swiglu_wide, W2, 1, SWIGLU, 3, false, true, 2)
STREAM(stream_w2_n16_swiglu_wide, W2, 2, SWIGLU, 2, false, false, 2)
STREAM(stream_w2_n8_quant_bf16, W2, 1, STORE_BF16, 2, true, false, 3)
STREAM(stream_w2_n8_quant_bf16_wide, W2, 1, STORE_BF16, 3, true, true, 2)
STREAM(stream_mxfp4_n8_swiglu, MXFP4, 1, SWIGLU, 2, false, false, 3)
STREAM(stream_mxfp4_n8_swiglu_wide, MXFP4, 1, SWIGLU, 2, false, true, 2)
STREAM(stream_mxfp4_n8_quant_bf16_wide, MXFP4, 1, STORE_BF16, 2, true, true, 2)
STREAM(stream_nvfp4_n4_swiglu_wide, NVFP4, 0, SWIGLU, 2, false, true, 2)
STREAM(stream_nvfp4_n4_quant_bf16, NVFP4, 0, STORE_BF16, 2, true, true, 3)
STREAM(stream_nvfp4_n4_quant_bf16_wide, NVFP4, 0, STORE_BF16, 2, true, true, 2)
STREAM(stream_nvfp4_n8_swiglu_wide, NVFP4, 1, SWIGLU, 2, false, true, 2)
STREAM(stream_nvfp4_n8_quant_bf16_wide, NVFP4, 1, STORE_BF16, 2, true, true, 2)
STREAM(stream_fp8_n8_bf16_wide, FP8, 1, STORE_BF16, 2, false, true, 2)
STREAM(stream_fp8_n16_bf16_wide, FP8, 2, STORE_BF16, 2, false, false, 2)
STREAM(stream_fp8_n32_bf16_wide, FP8, 4, STORE_BF16, 2, false, false, 2)
STREAM(stream_fp8_n8_f32_wide, FP8, 1, STORE_F32, 2, false, true, 2)
STREAM(stream_fp8_n8_quant_bf16_wide, FP8, 1, STORE_BF16, 2, true, true, 2)
STREAM(stream_fp8_n8_swiglu, FP8, 1, SWIGLU, 1, false, false, 3)
STREAM(stream_fp8_n32_swiglu_wide, FP8, 4, SWIGLU, 2, false, false, 2)
STREAM(stream_fp8_n8_swiglu_wide, FP8, 1, SWIGLU, 2, false, true, 2)
STREAM(stream_bf16_n8_f32_wide, BF16, 1, STORE_F32, 2, false, true, 2)
STREAM(stream_bf16_n16_f32_wide, BF16, 2, STORE_F32, 2, false, false, 2)
STREAM(stream_bf16_n32_f32_wide, BF16, 4, STORE_F32, 2, false, false, 2)
STREAM(stream_bf16_n8_bf16_wide, BF16, 1, STORE_BF16, 2, false, true, 2)
STREAM(stream_bf16_n16_bf16_wide, BF16, 2, STORE_BF16, 2, false, false, 2)

// Of products in so few tiles that their columns are cut in eight: clusters sum the slices.
#undef STREAM
#define STREAM(name, codec, nt, epilogue, quantise, overlap, ctas)                     \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT StreamArgs args) {                          \
    StreamGemm<codec, nt, epilogue, 2, quantise, overlap, true>(args).run();           \
  }                                                                                    \
  CLUSTERED(name, StreamArgs, THREADS)

STREAM(stream_fp8_n8_bf16_split, FP8, 1, STORE_BF16, false, true, 2)
STREAM(stream_fp8_n16_bf16_split, FP8, 2, STORE_BF16, false, false, 2)
STREAM(stream_fp8_n32_bf16_split, FP8, 4, STORE_BF16, false, false, 2)
STREAM(stream_fp8_n8_quant_bf16_split, FP8, 1, STORE_BF16, true, true, 2)

// Of few rows, with the work list in shared memory. Three CTAs fit in an SM; their registers leave room for one
// of the kernel that follows, which prepares meanwhile.
#undef STREAM
#define STREAM(name, codec, nt, epilogue, stages, quantise, ctas)                      \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT StreamArgs args) {                          \
    StreamGemm<codec, nt, epilogue, stages, quantise, false, false, false, true>(args).run(); \
  }                                                                                    \
  LAUNCHABLE(name, StreamArgs, THREADS)

STREAM(stream_w2_n8_quant_bf16_listed, W2, 1, STORE_BF16, 2, true, 4)
