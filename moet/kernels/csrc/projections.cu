// Two products of the same input in one launch, one of fp8 weights into bf16, one of bf16 weights
// into fp32: some CTAs stream the one, the others the other, each as stream_gemm.cuh does alone.
#include "stream_gemm.cuh"

struct TwoProducts {
  StreamArgs quantised, plain;
  int quantised_ctas;  // the first ones
};

#define STREAM(name, nt, overlap, ctas)                                                           \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT TwoProducts args) {                                    \
    int cta = blockIdx.x, before = args.quantised_ctas;                                           \
    if (cta < before)                                                                             \
      StreamGemm<FP8, nt, STORE_BF16, 2, false, overlap>(args.quantised, cta, before).run();      \
    else                                                                                          \
      StreamGemm<BF16, nt, STORE_F32, 2, false, overlap>(args.plain, cta - before, gridDim.x - before).run(); \
  }                                                                                               \
  LAUNCHABLE(name, TwoProducts, THREADS)

STREAM(project_n8, 1, true, 2)
STREAM(project_n16, 2, false, 2)
