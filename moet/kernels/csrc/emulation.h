// The machine of device.cuh and mma.cuh on a CPU, for tests without a GPU.
//
// Every thread of a block is a fiber. Barriers, shuffles and matrix instructions are meeting points;
// a meeting that cannot happen (a divergent collective) ends the run with an error. Copies into
// shared memory arrive only when they are waited for, so a missing wait shows. Matrix instructions
// take their operands from the documented places of each lane, and sum in double. Not covered: memory
// ordering between threads, timing, and the rounding inside the real accumulators.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define DEVICE inline
#define KERNEL(threads, ctas) static void
#define GRID_CONSTANT const
#define LAUNCHABLE(name, Args, threads)                                                       \
  extern "C" int emulate_##name(const Args* args, int grid_x, int grid_y, int shared_bytes) { \
    return emulation::run_grid(grid_x, grid_y, threads, shared_bytes, [=] { name(*args); });  \
  }

struct float2 {
  float x, y;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Index3 {
  unsigned x, y, z;
};
inline Index3 threadIdx, blockIdx, gridDim;

namespace emulation {
enum Wait { RUNNING, WARP, NAMED, SPIN, BLOCK, DONE };
struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  Wait wait = RUNNING;
  int barrier = 0, meeting_size = 0;  // while it waits at a named barrier
  std::vector<std::vector<Copy>> copies = {{}};
};
// What a lane brings to a meeting of its warp.
struct Offer {
  uint32_t value, a[4], b[2], scale;
  float* d;
  const uint8_t* b_shared;
};
inline std::vector<Fiber> fibers;
inline std::vector<Offer> offers;
inline std::vector<uint8_t> shared_memory;
inline std::function<void(Offer*)> meeting;
inline std::function<void()> body;
inline ucontext_t scheduler;
inline unsigned current;

inline void pause(Wait wait) {
  unsigned me = current;
  fibers[me].wait = wait;
  swapcontext(&fibers[me].context, &scheduler);
}
inline void meet(std::function<void(Offer*)> f) {
  meeting = std::move(f);  // every lane of a warp brings the same
  pause(WARP);
}
inline Offer& mine() { return offers[current]; }
inline void trampoline() {
  body();
  fibers[current].wait = DONE;
  swapcontext(&fibers[current].context, &scheduler);
}
inline bool all(unsigned from, unsigned to, Wait wait) {
  for (unsigned i = from; i < to; i++)
    if (fibers[i].wait != wait && fibers[i].wait != DONE) return false;
  return true;
}
inline bool step_warp(unsigned first) {
  bool ran = false;
  for (unsigned i = first; i < first + 32; i++)
    if (fibers[i].wait == RUNNING) {
      current = threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      ran = true;
    }
  for (unsigned i = first; i < first + 32; i++)
    if (fibers[i].wait != WARP) return ran;
  meeting(&offers[first]);
  for (unsigned i = first; i < first + 32; i++) fibers[i].wait = RUNNING;
  return true;
}
inline bool release_named(unsigned threads) {
  for (unsigned first = 0; first < threads; first++) {
    if (fibers[first].wait != NAMED) continue;
    int there = 0;
    for (unsigned i = 0; i < threads; i++)
      there += fibers[i].wait == NAMED && fibers[i].barrier == fibers[first].barrier;
    if (there < fibers[first].meeting_size) continue;
    int barrier = fibers[first].barrier;
    for (unsigned i = 0; i < threads; i++)
      if (fibers[i].wait == NAMED && fibers[i].barrier == barrier) fibers[i].wait = RUNNING;
    return true;
  }
  return false;
}
inline bool release_spinning(unsigned threads) {
  bool any = false;
  for (unsigned i = 0; i < threads; i++)
    if (fibers[i].wait == SPIN) fibers[i].wait = RUNNING, any = true;
  return any;
}
inline void prepare_block(unsigned threads, int shared_bytes) {
  shared_memory.assign(shared_bytes + 1024, 0xFF);  // poison
  fibers.resize(threads);
  offers.assign(threads, {});
  for (Fiber& f : fibers) {
    f.wait = RUNNING;
    f.copies = {{}};
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    makecontext(&f.context, trampoline, 0);
  }
}
enum Progress { ENDED, SPINNING, STUCK };
// Runs a block until it ends, or only threads that wait for memory are left (they are woken).
inline Progress advance_block(unsigned threads) {
  for (;;) {
    bool ran = false;
    for (unsigned w = 0; w < threads; w += 32)
      while (step_warp(w)) ran = true;
    if (all(0, threads, DONE)) return ENDED;
    if (release_named(threads)) ran = true;
    if (ran) continue;
    if (all(0, threads, BLOCK)) {
      for (Fiber& f : fibers)
        if (f.wait == BLOCK) f.wait = RUNNING;
    } else {
      return release_spinning(threads) ? SPINNING : STUCK;
    }
  }
}
inline int fail(const char* why) {
  fprintf(stderr, "emulation: %s\n", why);
  return 1;
}
constexpr int PATIENCE = 1000;  // rounds in which nothing but spinning happens

inline int run_grid(int x, int y, int threads, int shared_bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  gridDim = {unsigned(x), unsigned(y), 1};
  for (int j = 0; j < y; j++)
    for (int i = 0; i < x; i++) {
      blockIdx = {unsigned(i), unsigned(j), 0};
      prepare_block(threads, shared_bytes);
      Progress progress = SPINNING;
      for (int spins = 0; progress == SPINNING && spins < PATIENCE; spins++) progress = advance_block(threads);
      if (progress != ENDED) return fail("a collective that not all threads reach");
    }
  return 0;
}

// A block that is not running.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Offer> offers;
  std::vector<uint8_t> shared_memory;
  Progress progress = SPINNING;

  void exchange(unsigned index) {
    std::swap(fibers, emulation::fibers);
    std::swap(offers, emulation::offers);
    std::swap(shared_memory, emulation::shared_memory);
    blockIdx = {index, 0, 0};
  }
};
// All blocks in turn, each until it ends or waits for another one.
inline int run_blocks(std::vector<Block>& blocks, int first, int grid, int threads, int shared_bytes) {
  gridDim = {unsigned(grid), 1, 1};
  for (Block& b : blocks) {
    b.exchange(0);
    prepare_block(threads, shared_bytes);
    b.exchange(0);
  }
  for (int round = 0; round < PATIENCE; round++) {
    bool waiting = false;
    for (int i = int(blocks.size()) - 1; i >= 0; i--) {  // the last first: it waits for those before it
      Block& b = blocks[i];
      if (b.progress != SPINNING) continue;
      b.exchange(first + i);
      Progress now = advance_block(threads);
      b.exchange(first + i);
      b.progress = now;
      if (now == STUCK) return fail("a collective that not all threads reach");
      waiting = waiting || now == SPINNING;
    }
    if (!waiting) return 0;
  }
  return fail("blocks that wait for each other");
}
inline int run_together(int grid, int threads, int shared_bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  std::vector<Block> blocks(grid);
  return run_blocks(blocks, 0, grid, threads, shared_bytes);
}

// Clusters one after the other, the blocks of one together.
inline std::vector<Block>* cluster;
inline unsigned first_of_cluster, arrived;
inline int run_clusters(int grid, int of, int threads, int shared_bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  for (first_of_cluster = 0; first_of_cluster < unsigned(grid); first_of_cluster += of) {
    std::vector<Block> blocks(of);
    cluster = &blocks, arrived = 0;
    int failed = run_blocks(blocks, first_of_cluster, grid, threads, shared_bytes);
    cluster = nullptr;
    if (failed) return 1;
  }
  return 0;
}
inline void meet_cluster() {
  unsigned everybody = cluster->size() * fibers.size(), until = (arrived++ / everybody + 1) * everybody;
  while (arrived < until) pause(SPIN);
}
inline uint8_t* aligned(std::vector<uint8_t>& memory) {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 1023) / 1024 * 1024);
}
template <typename T>
const T* of_rank(const T* mine, int rank) {
  if (blockIdx.x == first_of_cluster + rank) return mine;
  auto offset = reinterpret_cast<const uint8_t*>(mine) - aligned(shared_memory);
  return reinterpret_cast<const T*>(aligned((*cluster)[rank].shared_memory) + offset);
}

inline float e4m3(uint8_t v) {
  int e = v >> 3 & 15, m = v & 7;
  float r = e ? ldexpf(1 + m / 8.f, e - 7) : ldexpf(m / 8.f, -6);
  return (v & 0x7F) == 0x7F ? NAN : v & 0x80 ? -r : r;
}
inline float e5m2(uint8_t v) {
  int e = v >> 2 & 31, m = v & 3;
  float r = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1 + m / 4.f, e - 15) : ldexpf(m / 4.f, -14);
  return v & 0x80 ? -r : r;
}
inline float bf16(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
}  // namespace emulation

DEVICE uint8_t* dynamic_shared() {
  auto p = reinterpret_cast<uintptr_t>(emulation::shared_memory.data());
  return reinterpret_cast<uint8_t*>((p + 1023) / 1024 * 1024);
}
DEVICE void sync_threads() { emulation::pause(emulation::BLOCK); }
template <int THREADS_THERE>
DEVICE void sync_named(int barrier) {
  auto& f = emulation::fibers[emulation::current];
  f.barrier = barrier, f.meeting_size = THREADS_THERE;
  emulation::pause(emulation::NAMED);
}
DEVICE void sync_warpgroup(int group) { sync_named<128>(group + 1); }
DEVICE void sync_warp() {
  emulation::meet([](emulation::Offer*) {});
}
// phase in bit 63, arrivals expected in 62:48, arrivals to come in 47:32, bytes to come in 31:0.
DEVICE void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  *barrier = uint64_t(arrivals) << 48 | uint64_t(arrivals) << 32;
}
DEVICE void barriers_are_ready() {}
DEVICE void barrier_change(uint64_t* barrier, int arrivals, int bytes) {
  uint32_t expected = *barrier >> 48 & 0x7FFF, to_come = (*barrier >> 32 & 0xFFFF) - arrivals;
  uint32_t left = uint32_t(*barrier) + bytes;
  uint64_t phase = *barrier >> 63;
  if (to_come == 0 && left == 0) phase ^= 1, to_come = expected;
  *barrier = phase << 63 | uint64_t(expected) << 48 | uint64_t(to_come) << 32 | left;
}
DEVICE void barrier_arrive(uint64_t* barrier) { barrier_change(barrier, 1, 0); }
DEVICE void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) { barrier_change(barrier, 1, bytes); }
DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (*barrier >> 63 == parity) emulation::pause(emulation::SPIN);
}
template <int REGISTERS>
DEVICE void give_registers() {}
template <int REGISTERS>
DEVICE void take_registers() {}
DEVICE void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  memcpy(to, from, bytes);
  barrier_change(barrier, 0, -int(bytes));
}
DEVICE void copy16(void* to, const void* from, bool valid) {
  emulation::fibers[emulation::current].copies.back().push_back({to, from, 16, valid});
}
DEVICE void copy4(void* to, const void* from, bool valid) {
  emulation::fibers[emulation::current].copies.back().push_back({to, from, 4, valid});
}
DEVICE uint4 load_streaming(const uint4* p) { return *p; }
DEVICE void commit_copies() { emulation::fibers[emulation::current].copies.push_back({}); }
template <int N>
DEVICE void wait_copies() {
  auto& groups = emulation::fibers[emulation::current].copies;  // the last one is still open
  while (groups.size() > N + 1) {
    for (auto& c : groups.front())
      c.valid ? memcpy(c.to, c.from, c.bytes) : memset(c.to, 0, c.bytes);
    groups.erase(groups.begin());
  }
}
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_start() {}

DEVICE uint32_t float_bits(float v) {
  uint32_t r;
  memcpy(&r, &v, 4);
  return r;
}
DEVICE float bits_float(uint32_t v) {
  float r;
  memcpy(&r, &v, 4);
  return r;
}
DEVICE uint32_t shuffle(uint32_t value, int lane) {
  emulation::mine().value = value;
  emulation::mine().scale = lane;
  emulation::meet([](emulation::Offer* o) {
    uint32_t r[32];
    for (int i = 0; i < 32; i++) r[i] = o[o[i].scale & 31].value;
    for (int i = 0; i < 32; i++) o[i].value = r[i];
  });
  return emulation::mine().value;
}
DEVICE float shuffle_xor(float value, int mask) {
  return bits_float(shuffle(float_bits(value), (threadIdx.x & 31) ^ mask));
}
DEVICE uint32_t warp_max(uint32_t value) {
  for (int step = 1; step < 32; step *= 2) {
    uint32_t other = shuffle(value, (threadIdx.x & 31) ^ step);
    value = other > value ? other : value;
  }
  return value;
}
DEVICE uint32_t warp_min(uint32_t value) { return ~warp_max(~value); }
template <uint32_t MASK, uint32_t FACTOR>
DEVICE uint32_t masked_multiply_add(uint32_t a, uint32_t b) {
  return (a & MASK) * FACTOR + b;
}
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t s = selector >> (4 * i), byte = both >> (8 * (s & 7)) & 0xFF;
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << (8 * i);
  }
  return r;
}
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float div_rn(float a, float b) { return a / b; }
DEVICE float div_approx(float a, float b) { return a / b; }
DEVICE float sqrt_rn(float v) { return sqrtf(v); }
DEVICE float exp_precise(float v) { return expf(v); }
DEVICE float log1p_precise(float v) { return log1pf(v); }
DEVICE float exp_approx(float v) { return expf(v); }
DEVICE uint16_t to_bf16(float v) {
  uint32_t b = float_bits(v);
  if (v != v) return 0x7FC0;
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE uint32_t to_e4m3(float v) {
  uint32_t sign = float_bits(v) >> 24 & 0x80;
  float m = fabsf(v);
  if (!(m == m)) return 0x7F;
  if (m >= 464.0f) return sign | 0x7E;
  int e = m < 0.015625f ? -6 : ilogbf(m);
  float q = nearbyintf(ldexpf(m, 3 - e));  // to nearest, ties to even
  if (q == 16.0f) q = 8.0f, e++;
  uint32_t bits = q < 8.0f ? uint32_t(q) : uint32_t((e + 7) << 3) + uint32_t(q) - 8;
  return sign | (bits > 0x7E ? 0x7E : bits);
}
DEVICE uint32_t to_e4m3x2(float lo, float hi) { return to_e4m3(lo) | to_e4m3(hi) << 8; }
DEVICE void fence_shared_for_matrix_units() {}
DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) {
  uint32_t old = *p;
  *p += v;
  return old;
}
DEVICE void atomic_or(uint32_t* p, uint32_t v) { *p |= v; }
DEVICE void fence_device() {}
DEVICE float load_volatile(const float* p) { return *p; }
DEVICE void trap_in_debug() {}
