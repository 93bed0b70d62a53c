// Instances of short_stream.cuh: in decode, the dense products of a layer.
#include "short_stream.cuh"

#define STREAM(name, quantise, sum, ctas)                            \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT ShortArgs args) {         \
    ShortStream<FP8, quantise, STORE_BF16, sum>(args).run(blockIdx.x); \
  }                                                                  \
  LAUNCHABLE(name, ShortArgs, THREADS)

STREAM(short_fp8_bf16, false, BY_COUNT, 2)
STREAM(short_fp8_quant_bf16, true, BY_COUNT, 2)
STREAM(short_fp8_bf16_whole, false, WHOLE, 2)
STREAM(short_fp8_bf16_handed, false, BY_HAND, 2)
STREAM(short_fp8_quant_bf16_handed, true, BY_HAND, 2)

// Whose clusters sum the slices.
#undef STREAM
#define STREAM(name, quantise, ctas)                                  \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT ShortArgs args) {          \
    ShortStream<FP8, quantise, STORE_BF16, BY_CLUSTER>(args).run(blockIdx.x); \
  }                                                                   \
  CLUSTERED(name, ShortArgs, THREADS)

STREAM(short_fp8_bf16_cluster, false, 2)
STREAM(short_fp8_quant_bf16_cluster, true, 2)

// fp8 weights into bf16 beside bf16 weights into fp32, of the same input.
struct ShortPair {
  ShortArgs quantised, plain;
  int quantised_ctas;  // the first ones
};
template <int SUM>
DEVICE void run_pair(const ShortPair& args) {
  int cta = blockIdx.x, before = args.quantised_ctas;
  if (cta < before)
    ShortStream<FP8, false, STORE_BF16, SUM>(args.quantised).run(cta);
  else
    ShortStream<BF16, false, STORE_F32, SUM>(args.plain).run(cta - before);
}
KERNEL(THREADS, 2) short_pair(GRID_CONSTANT ShortPair args) { run_pair<BY_COUNT>(args); }
LAUNCHABLE(short_pair, ShortPair, THREADS)
KERNEL(THREADS, 2) short_pair_handed(GRID_CONSTANT ShortPair args) { run_pair<BY_HAND>(args); }
LAUNCHABLE(short_pair_handed, ShortPair, THREADS)
