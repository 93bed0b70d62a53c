// Instances of short_stream.cuh: in decode, the dense products of a layer.
#include "short_stream.cuh"

// One slice of the columns.
#define STREAM(name, quantise, ctas)                                    \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT ShortArgs args) {            \
    ShortStream<FP8, quantise, STORE_BF16, WHOLE>(args).run(blockIdx.x); \
  }                                                                     \
  LAUNCHABLE(name, ShortArgs, THREADS)

STREAM(short_fp8_bf16_whole, false, 2)

// Several, which a cluster sums.
#undef STREAM
#define STREAM(name, quantise, ctas)                                         \
  KERNEL(THREADS, ctas) name(GRID_CONSTANT ShortArgs args) {                 \
    ShortStream<FP8, quantise, STORE_BF16, BY_CLUSTER>(args).run(blockIdx.x); \
  }                                                                          \
  CLUSTERED(name, ShortArgs, THREADS)

STREAM(short_fp8_bf16, false, 2)
STREAM(short_fp8_quant_bf16, true, 2)

// fp8 weights into bf16 beside bf16 weights into fp32, of the same input.
struct ShortPair {
  ShortArgs quantised, plain;
  int quantised_ctas;  // the first ones
};
KERNEL(THREADS, 2) short_pair(GRID_CONSTANT ShortPair args) {
  int cta = blockIdx.x, before = args.quantised_ctas;
  if (cta < before)
    ShortStream<FP8, false, STORE_BF16, BY_COUNT>(args.quantised).run(cta);
  else
    ShortStream<BF16, false, STORE_F32, BY_COUNT>(args.plain).run(cta - before);
}
LAUNCHABLE(short_pair, ShortPair, THREADS)
