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

struct GroupArgs {
  StreamArgs stream;  // without lists
  int rows;           // of each of num_slots groups, at most 8: group g's row i is i * num_slots + g
  int lists_at;       // of the shared memory
};

// Each group's rows through its matrix. The lists of what is there are made here: in memory they would be
// read one after the other before the first weight.
KERNEL(THREADS, 2) groups_n8(GRID_CONSTANT GroupArgs args) {
  int groups = args.stream.num_slots, rows = args.rows;
  Entry* entries = reinterpret_cast<Entry*>(dynamic_shared() + args.lists_at);
  int* pairs = reinterpret_cast<int*>(entries + groups);
  int* count = pairs + groups * rows;
  for (int g = threadIdx.x; g < groups; g += THREADS) {
    entries[g] = {g, g, g * rows, rows};
    for (int i = 0; i < rows; i++) pairs[g * rows + i] = i * groups + g;
    if (g == 0) *count = groups;
  }
  sync_threads();
  StreamArgs p = args.stream;
  p.entries = entries, p.pairs = pairs, p.num_entries = count, p.early = 1;
  StreamGemm<FP8, 1, STORE_BF16, 2, false, true>(p).run();
}
LAUNCHABLE(groups_n8, GroupArgs, THREADS)
