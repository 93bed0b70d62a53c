// Launches in which some CTAs stream the shared expert and the others do what the routed experts need
// meanwhile, each as its own kernel does alone, so that the bits are the same and no SM is idle: the
// choice beside gate and up of the shared expert, then the routed ones' beside its down.
#include "choose.cuh"

struct BeginArgs {
  ChooseArgs choose;
  StreamArgs shared;  // fp8; its CTAs come after those that choose
};

#ifdef MOET_EMULATE
DEVICE void ask_for_line(const void*) {}
#else
// The 128 bytes around an address into the second-level cache.
DEVICE void ask_for_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }
#endif

// What only the last CTA reads, when others wait for it.
DEVICE void ask_for_tables(const ChooseArgs& p) {
  for (int e = threadIdx.x * 16; e < p.experts; e += THREADS * 16) {
    ask_for_line(p.slot_of[0] + e);
    if (p.slot_of[1]) ask_for_line(p.slot_of[1] + e);
    if (p.bias) ask_for_line(p.bias + e);
  }
}

template <int STAGES, bool ASKS>
DEVICE void begin(const BeginArgs& args) {
  int cta = blockIdx.x, before = args.choose.ctas;
  if (ASKS && cta == 0) ask_for_tables(args.choose);
  if (cta < before)
    Choose(args.choose).run();
  else
    StreamGemm<FP8, 1, SWIGLU, STAGES, false, true>(args.shared, cta - before, gridDim.x - before).run();
}
KERNEL(THREADS, 1) pair_begin(GRID_CONSTANT BeginArgs args) { begin<4, false>(args); }
LAUNCHABLE(pair_begin, BeginArgs, THREADS)
KERNEL(THREADS, 1) pair_begin_asking(GRID_CONSTANT BeginArgs args) { begin<4, true>(args); }
LAUNCHABLE(pair_begin_asking, BeginArgs, THREADS)
KERNEL(THREADS, 1) pair_begin_small(GRID_CONSTANT BeginArgs args) { begin<1, false>(args); }
LAUNCHABLE(pair_begin_small, BeginArgs, THREADS)

struct PairArgs {
  StreamArgs routed, shared;  // the shared expert's weights are fp8
  int shared_ctas;            // the first ones: they have the larger items
};

#define STREAM(name, codec, stages, ctas)                                                           \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT PairArgs args) {                                         \
    int cta = blockIdx.x, before = args.shared_ctas;                                                \
    if (cta < before)                                                                               \
      StreamGemm<FP8, 1, STORE_BF16, 2, true, true>(args.shared, cta, before).run();                \
    else                                                                                            \
      StreamGemm<codec, 1, SWIGLU, stages, false, true>(args.routed, cta - before, gridDim.x - before).run(); \
  }                                                                                                 \
  LAUNCHABLE(name, PairArgs, THREADS)

STREAM(pair_w2, W2, 3, 2)
STREAM(pair_mxfp4, MXFP4, 2, 2)
STREAM(pair_nvfp4, NVFP4, 2, 2)
