// Two products of the same input in one launch, one of fp8 weights into bf16, one of bf16 weights
// into fp32: some CTAs stream the one, the others the other, each as stream_gemm.cuh does alone.
#include "stream_gemm.cuh"

struct TwoProducts {
  StreamArgs quantised, plain;
  int quantised_ctas;  // the first ones
};

#ifdef MOET_EMULATE
DEVICE void ask_for(const void*, uint32_t) {}
#else
// Bytes, a multiple of 16, into the second-level cache.
DEVICE void ask_for(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#endif

// Asks for the weights of this CTA's items, in one segment and shared by its warpgroups, that its ring
// of `held` stages does not hold, so that they are near when the inputs are there.
template <typename Gemm>
DEVICE void ask_for_rest(const StreamArgs& p, const Gemm& gemm, int held) {
  constexpr int STEP = Gemm::CPS * Gemm::CODE_BYTES;
  int items = gemm.num_items(), each = gemm.share(items), more = items - each * gemm.ctas;
  int first = each * gemm.cta + (gemm.cta < more ? gemm.cta : more), last = first + each + (gemm.cta < more);
  Cursor at;
  at.seek(p, first);
#pragma unroll 1
  for (; at.item < last; at.step(p, 1)) {
    int from = gemm.group ? p.first_half_stages : 0, to = gemm.group ? gemm.slice_stages : p.first_half_stages;
    int skipped = held < to - from ? held : to - from;
    held -= skipped;
    from = (at.slice * gemm.slice_stages + from + skipped) * STEP, to = (at.slice * gemm.slice_stages + to) * STEP;
    if (to > p.chunks * Gemm::CODE_BYTES) to = p.chunks * Gemm::CODE_BYTES;
    if (gemm.lane != 0 || from >= to) continue;
    uint64_t row_tile = at.in_segment * 4 + gemm.warp;
    ask_for(p.weights + gemm.entry(at.entry).slot * p.row_stride + row_tile * (p.chunks * Gemm::CODE_BYTES) + from, to - from);
  }
}

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

// A product that may begin long before its inputs are there: nearly all of its weights wait in rings as
// deep as the memory of an SM, the rest in the second-level cache. Entries were written before the kernel ahead.
KERNEL(THREADS, 1) groups_n8_deep(GRID_CONSTANT StreamArgs args) {
  constexpr int STAGES = 6;
  StreamGemm<FP8, 1, STORE_BF16, STAGES, false, true> gemm(args);
  ask_for_rest(args, gemm, STAGES);
  gemm.run();
}
LAUNCHABLE(groups_n8_deep, StreamArgs, THREADS)
