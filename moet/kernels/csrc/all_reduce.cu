// Sums and gathers of small tensors over the ranks of one host through memory that all can write:
// see comm.py.
//
// A rank pushes its own values to every other rank, eight bytes at a time with the number of the
// call beside each four, and takes the others' out of its own window as soon as they bear that
// number: no flags, no fences, no barriers, one way over the link. Terms are added as (0 + 1) +
// (2 + 3), so that every rank has the same bits. Two halves of a window take turns: a rank writes a
// half again only after it has had something of the call between from everybody, which they sent
// after all of their threads had read that half.
#include "device.cuh"

struct alignas(16) Packet {
  uint32_t low, low_turn, high, high_turn;
};
struct alignas(8) Pair {
  uint32_t low, high;
};

#ifdef MOET_EMULATE
#include <time.h>
DEVICE void push(Packet* to, Packet v) {
  const uint64_t* from = reinterpret_cast<const uint64_t*>(&v);
  uint64_t* words = reinterpret_cast<uint64_t*>(to);
  for (int i = 0; i < 2; i++) __atomic_store_n(words + i, from[i], __ATOMIC_RELEASE);
}
DEVICE Packet look(const Packet* p) {
  Packet v;
  const uint64_t* from = reinterpret_cast<const uint64_t*>(p);
  uint64_t* words = reinterpret_cast<uint64_t*>(&v);
  for (int i = 0; i < 2; i++) words[i] = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
  return v;
}
DEVICE int64_t limit_of(const int64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE int64_t clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
constexpr int LOOKS_PER_CLOCK = 64;
#else
// Each half of a packet is written and read at once, on the chip and over links.
DEVICE void push(Packet* to, Packet v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.low),
               "r"(v.low_turn), "r"(v.high), "r"(v.high_turn)
               : "memory");
}
DEVICE Packet look(const Packet* p) {
  Packet v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.low), "=r"(v.low_turn), "=r"(v.high), "=r"(v.high_turn)
               : "l"(p)
               : "memory");
  return v;
}
// In host memory, so that the host can end all waiting.
DEVICE int64_t limit_of(const int64_t* p) {
  int64_t v;
  asm volatile("ld.volatile.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE int64_t clock_ns() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
constexpr int LOOKS_PER_CLOCK = 2048;
#endif

constexpr int COMM_THREADS = 256;
constexpr int MAX_RANKS = 4;
constexpr uint32_t ERROR_RANK_MISSING = 1u << 16;  // shifted left by the rank

struct CommArgs {
  const Pair* x;
  void* out;
  Packet* windows[MAX_RANKS];  // of each rank: [2 halves][ranks][capacity]
  uint32_t* turns;             // [CTAs], of this rank
  uint32_t* error;
  const int64_t* limit_ns;
  int pairs, capacity, ranks, rank;
  int per_row;    // pairs of a row, for gathers
  int from_bf16;  // terms are bf16, four to a pair, and so are sums
  int to_bf16;    // sums of fp32 terms leave as bf16
};

// The part of a window that rank `from` fills in this turn.
DEVICE Packet* place_of(const CommArgs& p, int owner, int from, uint32_t turn) {
  return p.windows[owner] + static_cast<int64_t>((turn & 1) * p.ranks + from) * p.capacity;
}

// Returns false if the packet does not come in time.
DEVICE bool take(const CommArgs& p, int from, uint32_t turn, int i, Pair& value) {
  const Packet* place = place_of(p, p.rank, from, turn) + i;
  int64_t since = 0;
  for (int looks = 0;; looks++) {
    Packet found = look(place);
    if (found.low_turn == turn && found.high_turn == turn) {
      value = {found.low, found.high};
      return true;
    }
    if (looks % LOOKS_PER_CLOCK != LOOKS_PER_CLOCK - 1) continue;
    int64_t now = clock_ns();
    if (since == 0) since = now;
    if (now - since > limit_of(p.limit_ns)) {
      atomic_or(p.error, ERROR_RANK_MISSING << from);
      return false;
    }
  }
}

DEVICE uint32_t plus(uint32_t a, uint32_t b) {
  return float_bits(add_rn(bits_float(a), bits_float(b)));
}
DEVICE uint32_t bf16s(float low, float high) {
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}
// Of one fp32 number of each rank, as bits.
DEVICE uint32_t tree(const uint32_t* terms, int ranks) {
  uint32_t sum = terms[0];
  if (ranks >= 2) sum = plus(sum, terms[1]);
  if (ranks == 4) sum = plus(sum, plus(terms[2], terms[3]));
  return sum;
}
// Of two bf16 numbers of each rank, added in fp32 and rounded once.
DEVICE uint32_t tree_of_bf16(const uint32_t* terms, int ranks) {
  uint32_t low[MAX_RANKS], high[MAX_RANKS];
  for (int from = 0; from < MAX_RANKS; from++) {
    if (from >= ranks) break;
    low[from] = terms[from] << 16;
    high[from] = terms[from] & 0xFFFF0000u;
  }
  return bf16s(bits_float(tree(low, ranks)), bits_float(tree(high, ranks)));
}

// Hands this rank's pairs to all others; returns the turn.
DEVICE uint32_t push_all(const CommArgs& p, int first, int step) {
  uint32_t turn = p.turns[blockIdx.x] + 1;
  for (int i = first; i < p.pairs; i += step) {
    Pair v = p.x[i];
    for (int other = 0; other < p.ranks; other++)
      if (other != p.rank) push(place_of(p, other, p.rank, turn) + i, {v.low, turn, v.high, turn});
  }
  sync_threads();  // all have read the turn
  if (threadIdx.x == 0) p.turns[blockIdx.x] = turn;
  return turn;
}

KERNEL(COMM_THREADS, 1) all_reduce(GRID_CONSTANT CommArgs p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int first = blockIdx.x * COMM_THREADS + threadIdx.x, step = gridDim.x * COMM_THREADS;
  uint32_t turn = push_all(p, first, step);
  for (int i = first; i < p.pairs; i += step) {
    uint32_t low[MAX_RANKS], high[MAX_RANKS];
    bool there = true;
    for (int from = 0; from < MAX_RANKS; from++) {
      if (from >= p.ranks) break;
      Pair term{};
      if (from == p.rank) term = p.x[i];
      else there = there && take(p, from, turn, i, term);
      low[from] = term.low;
      high[from] = term.high;
    }
    if (!there) return;
    if (p.from_bf16) {
      static_cast<Pair*>(p.out)[i] = {tree_of_bf16(low, p.ranks), tree_of_bf16(high, p.ranks)};
    } else if (p.to_bf16) {
      float a = bits_float(tree(low, p.ranks)), b = bits_float(tree(high, p.ranks));
      static_cast<uint32_t*>(p.out)[i] = bf16s(a, b);
    } else {
      static_cast<Pair*>(p.out)[i] = {tree(low, p.ranks), tree(high, p.ranks)};
    }
  }
}
LAUNCHABLE(all_reduce, CommArgs, COMM_THREADS)

// Rows of all ranks side by side.
KERNEL(COMM_THREADS, 1) all_gather(GRID_CONSTANT CommArgs p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int first = blockIdx.x * COMM_THREADS + threadIdx.x, step = gridDim.x * COMM_THREADS;
  uint32_t turn = push_all(p, first, step);
  for (int i = first; i < p.pairs; i += step) {
    int row = i / p.per_row, column = i - row * p.per_row;
    Pair* out = static_cast<Pair*>(p.out) + static_cast<int64_t>(row) * p.ranks * p.per_row + column;
    for (int from = 0; from < p.ranks; from++) {
      Pair value;
      if (from == p.rank) value = p.x[i];
      else if (!take(p, from, turn, i, value)) return;
      out[from * p.per_row] = value;
    }
  }
}
LAUNCHABLE(all_gather, CommArgs, COMM_THREADS)
