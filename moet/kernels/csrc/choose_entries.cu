// The best of a row's scores, exactly, by a cluster of CTAs with a slice of them each. See device_choice.py.
//
// Scores become whole numbers in the same order. The least that is chosen is found by its digits, the highest
// first: every CTA counts the digits of its scores, adds its counts to those of all CTAs, and looks where the one
// wanted is. Of scores equal to the least the first entries are chosen.
#include "cluster.cuh"

constexpr int CHOICE_THREADS = 512;
constexpr int WARPS = CHOICE_THREADS / 32;
constexpr int ROUND = 128;  // scores that a warp takes at once; a slice is some rounds
constexpr int DIGIT = 8, DIGITS = 4, VALUES = 1 << DIGIT;
constexpr int EACH_LANE = VALUES / 32;
constexpr int PAIRS = VALUES / 2;  // of values, whose counts travel together
constexpr int COUNT = 12;          // bits: at most 4095 are chosen
constexpr uint32_t COUNTED = (1u << COUNT) - 1;

struct ChoiceArgs {
  float* scores;             // [rows, width]; they become keys
  const int64_t* positions;  // [rows]
  int32_t* out;              // [rows, top_k], ascending; -1 beyond what a row sees
  int64_t ratio_inverse;     // 2^32 over the tokens of an entry, rounded up
  int width, top_k;          // width a multiple of 4
  int slices;                // CTAs of a row, a cluster; at least two
  int held;                  // whether the largest slice fits in shared memory
};

struct ChoiceShared {
  uint4 counts[DIGITS][VALUES / 4];  // of this slice: how many scores have a value as their digit
  uint4 sums[DIGITS][VALUES / 4];    // of all slices
  uint64_t added[DIGITS];            // barriers: the sums are here,
  uint64_t told;                     // and `before` is
  uint64_t before;                   // chosen in earlier slices; above COUNT bits: equal to the least
  uint32_t of_warps[WARPS];          // the same of each warp here
};

#ifdef MOET_EMULATE
DEVICE void add_to_rank(uint64_t* mine, uint64_t* barrier, int rank, uint64_t v) {
  *const_cast<uint64_t*>(emulation::of_rank(mine, rank)) += v;
  barrier_change(const_cast<uint64_t*>(emulation::of_rank(barrier, rank)), 0, -8);
}
DEVICE uint32_t lanes_where(bool v) {
  emulation::mine().value = v;
  emulation::meet([](emulation::Offer* o) {
    uint32_t all = 0;
    for (int i = 0; i < 32; i++) all |= o[i].value << i;
    for (int i = 0; i < 32; i++) o[i].value = all;
  });
  return emulation::mine().value;
}
DEVICE uint32_t warp_total(uint32_t v) {
  for (int step = 16; step; step /= 2) v += shuffle(v, (threadIdx.x & 31) ^ step);
  return v;
}
DEVICE int num_ones(uint32_t v) { return __builtin_popcount(v); }
#else
// To what lies where `mine` lies, in the CTA `rank` of the cluster, whose barrier learns of it.
DEVICE void add_to_rank(uint64_t* mine, uint64_t* barrier, int rank, uint64_t v) {
  uint32_t to, bell;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bell) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%0], %1, [%2];" ::"r"(to),
               "l"(v), "r"(bell)
               : "memory");
}
DEVICE uint32_t lanes_where(bool v) { return __ballot_sync(~0u, v); }
DEVICE uint32_t warp_total(uint32_t v) { return __reduce_add_sync(~0u, v); }
DEVICE int num_ones(uint32_t v) { return __popc(v); }
#endif

// In the order of the scores; -0 counts as 0.
DEVICE uint32_t in_order(uint32_t score) {
  uint32_t bits = float_bits(add_rn(bits_float(score), 0.0f));
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// A thread's part of a slice: four keys in a row of each round of its warp.
struct Slice {
  uint4* keys;      // scores before their first visit
  int first, last;  // fours of the warp, the last one seen by the row
  int seen;         // keys of the slice that the row sees
  int lane;

  // Calls visit(four, keys), every lane of a warp as often; beyond what is seen keys are 0.
  template <typename Visit>
  DEVICE void each(Visit visit) const {
#pragma unroll 1  // code that comes once a layer is not in the instruction cache
    for (int base = first; base < last; base += 32) {
      int four = base + lane;
      uint4 raw = {};
      if (four * 4 < seen) raw = keys[four];
      uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      visit(four, words);
    }
  }
  // Scores become keys. Beyond what is seen they are 0, less than any score's.
  DEVICE void order(int four, uint32_t* words) const {
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = four * 4 + j < seen ? in_order(words[j]) : 0;
    if (four * 4 < seen) keys[four] = {words[0], words[1], words[2], words[3]};
  }
};

// Where the digit of the room-th highest is, of all slices' sums: whether all that share it fit in, how many are
// higher, and the digit, from bit 20, bit 8 and bit 0 on. All lanes of a warp.
DEVICE uint32_t find_digit(const uint4* sums, uint32_t room) {
  int lane = threadIdx.x & 31, highest = 31 - lane;  // a lane's values, lane 0 the highest ones
  uint4 low = sums[2 * highest], high = sums[2 * highest + 1];
  uint32_t sum[EACH_LANE] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, total = 0;
#pragma unroll
  for (int i = 0; i < EACH_LANE; i++) total += sum[i];
  uint32_t before = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    uint32_t other = shuffle(before, lane - step);
    if (lane >= step) before += other;
  }
  before -= total;
  uint32_t found = 0;
#pragma unroll
  for (int i = EACH_LANE - 1; i >= 0; i--) {
    uint32_t with = before + sum[i];
    if (before < room && with >= room) found = (with == room) << 20 | before << 8 | (highest * EACH_LANE + i);
    before = with;
  }
  return warp_max(found);
}

KERNEL(CHOICE_THREADS, 2) choose_entries(GRID_CONSTANT ChoiceArgs p) {
  ChoiceShared& s = *reinterpret_cast<ChoiceShared*>(dynamic_shared());
  uint4* kept = reinterpret_cast<uint4*>(&s + 1);
  int row = blockIdx.x / p.slices, slice = blockIdx.x - row * p.slices;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, pair = thread % PAIRS;
  uint4* counters = reinterpret_cast<uint4*>(&s) + thread;  // counts and sums
#pragma unroll
  for (int i = 0; i < 2 * DIGITS * VALUES / 4 / CHOICE_THREADS; i++) counters[i * CHOICE_THREADS] = {};
  if (thread == 0) {
    s.before = 0;
#pragma unroll 1
    for (int d = 0; d < DIGITS; d++) {
      barrier_init(&s.added[d], 1);
      barrier_arrive_expecting(&s.added[d], p.slices * VALUES * 4);
    }
    barrier_init(&s.told, 1);
    barrier_arrive_expecting(&s.told, slice * 8);
  }
  // Positions are older than the product of queries, which waits before it lets a kernel start: between it and
  // this one are the kernels that make queries and scores.
  int visible = static_cast<int>((p.positions[row] + 1) * p.ratio_inverse >> 32);
  int rounds = (visible + p.slices * ROUND - 1) / (p.slices * ROUND), begin = slice * rounds * ROUND;
  int seen = visible - begin;
  seen = seen < 0 ? 0 : seen > rounds * ROUND ? rounds * ROUND : seen;
  int first = warp * rounds / WARPS * 32, last = (warp + 1) * rounds / WARPS * 32, fours = (seen + 3) / 4;
  last = last < fours ? last : fours;
  uint4* scores = reinterpret_cast<uint4*>(p.scores + static_cast<int64_t>(row) * p.width + begin);
  sync_slices();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (p.held && visible > p.top_k) {
    for (int i = first + lane; i < last; i += 32) copy16(kept + i, scores + i, true);
    commit_copies();
    wait_copies<0>();
    scores = kept;
  }
  int32_t* out = p.out + static_cast<int64_t>(row) * p.top_k;
  if (visible <= p.top_k) {
#pragma unroll 1
    for (int k = slice * CHOICE_THREADS + thread; k < p.top_k; k += p.slices * CHOICE_THREADS)
      out[k] = k < visible ? k : -1;
    return;
  }
  Slice mine = {scores, first, last, seen, lane};

  uint32_t least = 0, room = p.top_k, all = 0;  // all: that share its digits are chosen
#pragma unroll 1
  for (int d = 0, shift = 32 - DIGIT; d < DIGITS && !all; d++, shift -= DIGIT) {
    uint32_t* counts = reinterpret_cast<uint32_t*>(s.counts[d]);
    uint32_t higher = d ? ~0u << (shift + DIGIT) : 0;
    mine.each([&](int four, uint32_t* keys) {
      if (d == 0) mine.order(four, keys);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (((keys[j] ^ least) & higher) == 0) atomic_add(counts + (keys[j] >> shift & (VALUES - 1)), 1);
    });
    sync_threads();
    uint64_t two = reinterpret_cast<uint64_t*>(s.counts[d])[pair];
    uint64_t* sum = reinterpret_cast<uint64_t*>(s.sums[d]) + pair;
#pragma unroll 4
    for (int rank = thread / PAIRS; rank < p.slices; rank += CHOICE_THREADS / PAIRS)
      add_to_rank(sum, &s.added[d], rank, two);
    barrier_wait(&s.added[d], 0);
    uint32_t found = find_digit(s.sums[d], room);
    least |= (found & (VALUES - 1)) << shift;
    room -= found >> 8 & COUNTED;
    all = found >> 20;
  }

  // The chosen, and above COUNT bits those equal to the least, of which `room` are chosen.
  uint32_t floor = least - all, equal = all ? 0 : 1u << COUNT, total = 0;
  mine.each([&](int, uint32_t* keys) {
#pragma unroll
    for (int j = 0; j < 4; j++) total += keys[j] > floor ? 1 : keys[j] == floor ? equal : 0;
  });
  total = warp_total(total);
  if (lane == 0) s.of_warps[warp] = total;
  sync_threads();
  uint32_t before = 0, here = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) before += s.of_warps[w];
    here += s.of_warps[w];
  }
  if (thread > slice && thread < p.slices) add_to_rank(&s.before, &s.told, thread, here);
  barrier_wait(&s.told, 0);
  before += static_cast<uint32_t>(s.before);
  uint32_t earlier = (1u << lane) - 1;
  mine.each([&](int four, uint32_t* keys) {
    uint32_t at = before;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t above = lanes_where(keys[j] > floor), ties = all ? 0 : lanes_where(keys[j] == floor);
      at += num_ones(above & earlier) + (num_ones(ties & earlier) << COUNT);
      before += num_ones(above) + (num_ones(ties) << COUNT);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t is = keys[j] > floor ? 1 : keys[j] == floor ? equal : 0, ties = at >> COUNT;
      if (is == 1 || (is && ties < room)) out[(at & COUNTED) + (ties < room ? ties : room)] = begin + four * 4 + j;
      at += is;
    }
  });
}
CLUSTERED(choose_entries, ChoiceArgs, CHOICE_THREADS)
