// Two products of the same input in one launch, one of fp8 weights into bf16, one of bf16 weights
// into fp32: some CTAs stream the one, the others the other, each as stream_gemm.cuh does alone.
#include "stream_gemm.cuh"

struct TwoProducts {
  StreamArgs quantised, plain;
  int quantised_ctas;  // the first ones
};

KERNEL(THREADS, 2) project_n16(GRID_CONSTANT TwoProducts args) {
  int cta = blockIdx.x, before = args.quantised_ctas;
  if (cta < before)
    StreamGemm<FP8, 2, STORE_BF16, 2, false, false>(args.quantised, cta, before).run();
  else
    StreamGemm<BF16, 2, STORE_F32, 2, false, false>(args.plain, cta - before, gridDim.x - before).run();
}
LAUNCHABLE(project_n16, TwoProducts, THREADS)
