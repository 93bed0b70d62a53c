// Launches in which some CTAs stream the shared expert and the others do what the routed experts need
// meanwhile, each as its own kernel does alone, so that the bits are the same and no SM is idle: the
// choice beside gate and up of the shared expert, then the routed ones' beside its down.
#include "choose.cuh"

struct BeginArgs {
  ChooseArgs choose;
  StreamArgs shared;  // fp8; its CTAs come after those that choose
};

template <int STAGES>
DEVICE void begin(const BeginArgs& args) {
  int cta = blockIdx.x, before = args.choose.ctas;
  if (cta < before)
    Choose(args.choose).run();
  else
    StreamGemm<FP8, 1, SWIGLU, STAGES, false, true>(args.shared, cta - before, gridDim.x - before).run();
}
KERNEL(THREADS, 1) pair_begin(GRID_CONSTANT BeginArgs args) { begin<4>(args); }
LAUNCHABLE(pair_begin, BeginArgs, THREADS)
KERNEL(THREADS, 1) pair_begin_small(GRID_CONSTANT BeginArgs args) { begin<1>(args); }
LAUNCHABLE(pair_begin_small, BeginArgs, THREADS)

struct PairArgs {
  StreamArgs routed, shared;  // the shared expert's weights are fp8
  int shared_ctas;            // the first ones: they have the larger items
};

#define STREAM(name, codec, groups, stages, listed, ctas)                                \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT PairArgs args) {                              \
    int cta = blockIdx.x, before = args.shared_ctas, rest = gridDim.x - before;          \
    if (cta < before)                                                                    \
      StreamGemm<FP8, 1, STORE_BF16, 2, true, true>(args.shared, cta, before).run();     \
    else                                                                                 \
      StreamGemm<codec, groups, SWIGLU, stages, false, true, false, true, listed>(args.routed, cta - before, rest).run(); \
  }                                                                                      \
  LAUNCHABLE(name, PairArgs, THREADS)

STREAM(pair_w2, W2, 1, 3, false, 2)
STREAM(pair_w2_listed, W2, 1, 3, true, 2)
STREAM(pair_mxfp4, MXFP4, 1, 2, false, 2)
STREAM(pair_nvfp4, NVFP4, 1, 2, false, 2)
STREAM(pair_nvfp4_few, NVFP4, 0, 2, false, 2)
