// The choice alone, and experts of two formats in one launch.
#include "moe_decode.cuh"

KERNEL(THREADS, 2) choose_experts(GRID_CONSTANT ChooseArgs args) { Choose(args).run(); }
LAUNCHABLE(choose_experts, ChooseArgs, THREADS)

constexpr int MIXED_STAGES = 2;

KERNEL(THREADS, 2) moe_mixed(GRID_CONSTANT MoeArgs args) {
  MoeDecode<1 << W2 | 1 << MXFP4 | 1 << NVFP4 | 1 << FP8, MIXED_STAGES, true>(args).run();
}
COOPERATING(moe_mixed, MoeArgs, THREADS)
