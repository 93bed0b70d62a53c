// Routed experts and the shared one in one launch: some CTAs stream the one, the others the other,
// each as stream_gemm.cuh does alone, so that the bits are the same and no SM is idle.
#include "stream_gemm.cuh"

struct PairArgs {
  StreamArgs routed, shared;  // the shared expert's weights are fp8
  int shared_ctas;            // the first ones: they have the larger items
};

#define STREAM(name, codec, epilogue, stages, quantise, ctas)                                        \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT PairArgs args) {                                         \
    int cta = blockIdx.x, before = args.shared_ctas;                                                \
    if (cta < before)                                                                               \
      StreamGemm<FP8, 1, epilogue, 2, quantise, true>(args.shared, cta, before).run();              \
    else                                                                                            \
      StreamGemm<codec, 1, epilogue, stages, quantise, true>(args.routed, cta - before, gridDim.x - before).run(); \
  }                                                                                                 \
  LAUNCHABLE(name, PairArgs, THREADS)

STREAM(pair_w2_up, W2, SWIGLU, 3, false, 2)
STREAM(pair_w2_down, W2, STORE_BF16, 3, true, 2)
STREAM(pair_mxfp4_up, MXFP4, SWIGLU, 2, false, 2)
STREAM(pair_mxfp4_down, MXFP4, STORE_BF16, 2, true, 2)
