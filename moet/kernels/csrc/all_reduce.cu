// Sums of small tensors over the ranks of one host through memory that all can read: see comm.py.
//
// A CTA copies its part of this rank's terms to where the others read them, raises a flag at each
// of them, waits for theirs, and adds all terms as (0 + 1) + (2 + 3), so that every rank has the same
// bits. Two halves take turns: a rank writes a half again only after all have raised the flag of the
// turn between, which they do after reading it.
#include "device.cuh"

struct alignas(16) Four {
  float x, y, z, w;
};

#ifdef MOET_EMULATE
#include <time.h>
DEVICE uint32_t load_flag(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void store_flag(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE void publish() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE Four load_of_rank(const Four* p) { return *p; }
DEVICE int64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
#else
DEVICE uint32_t load_flag(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_flag(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void publish() { __threadfence_system(); }
// Past the caches that do not know what another GPU wrote.
DEVICE Four load_of_rank(const Four* p) {
  Four v;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEVICE int64_t clock_ns() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
#endif

constexpr int ALL_REDUCE_THREADS = 256;
constexpr int MAX_RANKS = 4;
constexpr uint32_t ERROR_RANK_MISSING = 1u << 16;  // shifted left by the rank

struct AllReduceArgs {
  const Four* x;
  Four* out;
  Four* buffers[MAX_RANKS];   // of each rank: two halves of `capacity` vectors
  uint32_t* flags[MAX_RANKS];   // at each rank: [ranks][CTAs], the turn that a rank's CTA has written
  uint32_t* turns;              // [CTAs], of this rank
  uint32_t* error;
  int64_t timeout_ns;
  int vectors, capacity, ranks, rank;
};

DEVICE Four plus(Four a, Four b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

KERNEL(ALL_REDUCE_THREADS, 1) all_reduce_f32(GRID_CONSTANT AllReduceArgs p) {
  wait_for_previous_kernel();
  int t = threadIdx.x, cta = blockIdx.x, ctas = gridDim.x;
  uint32_t turn = p.turns[cta] + 1;
  int half = (turn & 1) * p.capacity;
  int first = cta * ALL_REDUCE_THREADS + t, step = ctas * ALL_REDUCE_THREADS;
  for (int i = first; i < p.vectors; i += step) p.buffers[p.rank][half + i] = p.x[i];
  publish();
  sync_threads();
  if (t < p.ranks) {
    store_flag(p.flags[t] + p.rank * ctas + cta, turn);
    int64_t until = clock_ns() + p.timeout_ns;
    // A turn counts as reached when it is not behind; the difference survives the wrap at 2^32.
    while (static_cast<int32_t>(load_flag(p.flags[p.rank] + t * ctas + cta) - turn) < 0) {
      if (clock_ns() > until) {
        atomic_or(p.error, ERROR_RANK_MISSING << t);
        break;
      }
    }
  }
  sync_threads();
  for (int i = first; i < p.vectors; i += step) {
    Four sum = load_of_rank(p.buffers[0] + half + i);
    if (p.ranks >= 2) sum = plus(sum, load_of_rank(p.buffers[1] + half + i));
    if (p.ranks == 4)
      sum = plus(sum, plus(load_of_rank(p.buffers[2] + half + i),
                           load_of_rank(p.buffers[3] + half + i)));
    p.out[i] = sum;
  }
  sync_threads();
  if (t == 0) p.turns[cta] = turn;
}
LAUNCHABLE(all_reduce_f32, AllReduceArgs, ALL_REDUCE_THREADS)
