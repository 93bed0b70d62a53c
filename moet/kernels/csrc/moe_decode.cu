// Instances of a decode step's experts. Suffix: CTAs of an SM and stages of the ring.
#include "moe_decode.cuh"

KERNEL(THREADS, 2) choose_experts(GRID_CONSTANT ChooseArgs args) { Choose(args).run(); }
LAUNCHABLE(choose_experts, ChooseArgs, THREADS)

constexpr int WITH_FP8 = 1 << FP8;

#define STREAM(name, codecs, stages, ctas)                                                \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT MoeArgs args) {                             \
    MoeDecode<(codecs) | WITH_FP8, stages, true>(args).run();                          \
  }                                                                                    \
  COOPERATING(name, MoeArgs, THREADS)

STREAM(moe_w2_2x2, 1 << W2, 2, 2)
STREAM(moe_w2_2x3, 1 << W2, 3, 2)
STREAM(moe_w2_2x4, 1 << W2, 4, 2)
STREAM(moe_mxfp4_2x2, 1 << MXFP4, 2, 2)
STREAM(moe_mxfp4_2x3, 1 << MXFP4, 3, 2)
STREAM(moe_mxfp4_2x4, 1 << MXFP4, 4, 2)
STREAM(moe_nvfp4_2x2, 1 << NVFP4, 2, 2)
STREAM(moe_nvfp4_2x3, 1 << NVFP4, 3, 2)
STREAM(moe_nvfp4_2x4, 1 << NVFP4, 4, 2)
STREAM(moe_mixed_2x2, 1 << W2 | 1 << MXFP4 | 1 << NVFP4, 2, 2)
STREAM(moe_mixed_2x3, 1 << W2 | 1 << MXFP4 | 1 << NVFP4, 3, 2)
STREAM(moe_mixed_2x4, 1 << W2 | 1 << MXFP4 | 1 << NVFP4, 4, 2)
