// Values that ranks of one host push into each other's memory: see comm.py and all_reduce.cu.
#pragma once
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

constexpr int MAX_RANKS = 4;
constexpr uint32_t ERROR_RANK_MISSING = 1u << 16;  // shifted left by the rank

struct PeerArgs {
  Packet* windows[MAX_RANKS];  // of each rank: [2 halves][ranks][capacity]
  uint32_t* turns;             // of this rank: calls so far
  uint32_t* error;
  const int64_t* limit_ns;
  int capacity, ranks, rank;
};

// The part of a window that rank `from` fills in this turn.
DEVICE Packet* place_of(const PeerArgs& p, int owner, int from, uint32_t turn) {
  return p.windows[owner] + static_cast<int64_t>((turn & 1) * p.ranks + from) * p.capacity;
}

// Returns false if the packet does not come in time.
DEVICE bool take(const PeerArgs& p, int from, uint32_t turn, int i, Pair& value) {
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

// Hands a pair to all other ranks.
DEVICE void push_to_all(const PeerArgs& p, uint32_t turn, int i, Pair v) {
  for (int other = 0; other < p.ranks; other++)
    if (other != p.rank) push(place_of(p, other, p.rank, turn) + i, {v.low, turn, v.high, turn});
}

// Every rank's pair; false if one does not come.
DEVICE bool take_all(const PeerArgs& p, uint32_t turn, int i, Pair own, uint32_t* low, uint32_t* high) {
  bool there = true;
  for (int from = 0; from < MAX_RANKS; from++) {
    if (from >= p.ranks) break;
    Pair term = own;
    if (from != p.rank) there = there && take(p, from, turn, i, term);
    low[from] = term.low;
    high[from] = term.high;
  }
  return there;
}

// The sum of every rank's four bf16.
DEVICE bool sum_of_bf16(const PeerArgs& p, uint32_t turn, int i, Pair own, Pair& sum) {
  uint32_t low[MAX_RANKS], high[MAX_RANKS];
  bool there = take_all(p, turn, i, own, low, high);
  sum = {tree_of_bf16(low, p.ranks), tree_of_bf16(high, p.ranks)};
  return there;
}
