// The slot table of the expert cache, and rows from host memory into slots: see expert_cache.py.
#include "grid_sync.cuh"

#ifdef MOET_EMULATE
#include <time.h>
DEVICE int load_acquire_system(const int* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void store_release_system(int* p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
DEVICE void rest() {
  timespec t = {0, 100000};
  nanosleep(&t, nullptr);
}
DEVICE uint4 load_from_host(const uint4* p) { return *p; }
#else
DEVICE int load_acquire_system(const int* p) {
  int v;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release_system(int* p, int v) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE int64_t now_ns() {
  int64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
DEVICE void rest() { asm volatile("nanosleep.u32 500;"); }
// Of memory that the host may have written since this kernel began.
DEVICE uint4 load_from_host(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
#endif

constexpr int RESOLVE_THREADS = 1024;
constexpr int MAX_USES = 3, STATIC_USES = 255;
constexpr uint32_t ERROR_CAPACITY = 1u << 8, ERROR_TIMEOUT = 1u << 9, ERROR_READ = 1u << 10;

// An entry of stream_gemm.cuh and of moe_decode.cuh as far as they agree.
struct alignas(16) Listed {
  int slot;
  int expert;  // and above 16 bits what is none of ours
  int others[2];
};

struct ResolveArgs {
  const int64_t* expert_ids;  // [pairs]; below 0: of a row that does not count
  int64_t* slot_of;           // [rows of all layers]
  int* row_of;                // [slots]
  int* uses;                  // [slots]
  int* hand;
  int* fetch_rows;   // [experts]
  int* fetch_slots;  // [experts]
  int* num_fetch;
  unsigned long long* counters;  // of the layer: hits, misses, nanoseconds of copying
  uint32_t* error;
  unsigned* num_posted;  // rows asked for so far
  int* requests;         // mapped: a copy of num_posted and a ring of request_slots rows; or null
  Listed* listed[2];     // who has listed experts before they had slots; or null
  const int* num_listed[2];
  int pairs, experts, first_row, slots, request_slots;
};

// Inclusive prefix sum over the CTA; the sums end in `values`.
DEVICE void prefix_sums(int* values, int* other) {
  int t = threadIdx.x;
  sync_threads();
  for (int step = 1; step < RESOLVE_THREADS; step *= 2) {
    other[t] = values[t] + (t >= step ? values[t - step] : 0);
    sync_threads();
    int* swap = values;
    values = other, other = swap;
  }
}

// Gives the experts of lists their slots.
DEVICE void fill_lists(const ResolveArgs& p, const int64_t* slot_of) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
    if (!p.listed[n]) continue;
    int count = *p.num_listed[n];
    for (int i = threadIdx.x; i < count; i += RESOLVE_THREADS)
      p.listed[n][i].slot = static_cast<int>(slot_of[p.listed[n][i].expert & 0xFFFF]);
  }
}

// One CTA, a thread an expert and then a thread a slot: the hand goes over up to 1,024 slots at once
// and stops where it would have stopped slot by slot. before_lists: called by all threads.
template <typename BeforeLists>
DEVICE void resolve(const ResolveArgs& p, BeforeLists before_lists) {
  int* wanted = reinterpret_cast<int*>(dynamic_shared());
  int* sums = wanted + RESOLVE_THREADS;
  int* other = sums + RESOLVE_THREADS;
  int* misses = other + RESOLVE_THREADS;
  int* stop = misses + RESOLVE_THREADS;  // of the hand, within a window
  uint32_t* totals = reinterpret_cast<uint32_t*>(stop + 1);  // misses, experts asked for
  int t = threadIdx.x;
  wanted[t] = 0;
  if (t < 2) totals[t] = 0;
  sync_threads();
  for (int i = t; i < p.pairs; i += RESOLVE_THREADS) {
    int64_t id = p.expert_ids[i];
    if (id >= 0 && id < p.experts) wanted[id] = 1;
  }
  sync_threads();
  int64_t* slot_of = p.slot_of + p.first_row;
  int slot = -1;
  if (wanted[t]) slot = static_cast<int>(slot_of[t]);
  bool hit = slot >= 0, miss = wanted[t] && !hit;
  if (hit && p.uses[slot] < MAX_USES) p.uses[slot]++;
  if (miss) atomic_add(totals, 1u);
  if (wanted[t]) atomic_add(totals + 1, 1u);
  sync_threads();
  int needed = static_cast<int>(totals[0]), num_wanted = static_cast<int>(totals[1]);
  if (needed == 0) {  // mostly
    before_lists();
    fill_lists(p, slot_of);
    if (t == 0) {
      *p.num_fetch = 0;
      p.counters[0] += num_wanted;
    }
    return;
  }
  sums[t] = miss;
  prefix_sums(sums, other);
  if (miss) misses[sums[t] - 1] = t;
  int hand = *p.hand, found = 0;
  int window = p.slots < RESOLVE_THREADS ? p.slots : RESOLVE_THREADS;
  int most = (MAX_USES + 1) * ((p.slots + window - 1) / window) + 1;
  sync_threads();
  for (int turn = 0; turn < most && found < needed; turn++) {
    int at = hand + t;
    if (at >= p.slots) at -= p.slots;
    bool passed = true, candidate = false;
    if (t < window) {
      int expert = p.row_of[at] - p.first_row, uses = p.uses[at];
      bool kept = expert >= 0 && expert < p.experts && wanted[expert];
      passed = kept || uses == STATIC_USES;
      candidate = !passed && uses == 0;
    }
    if (t == 0) *stop = window - 1;
    sums[t] = candidate;
    prefix_sums(sums, other);
    int rank = sums[t], there = sums[RESOLVE_THREADS - 1];
    int taken = there < needed - found ? there : needed - found;
    if (candidate && rank == needed - found) *stop = t;
    sync_threads();
    int last = *stop;
    if (t < window && t <= last && !passed) {
      if (candidate) {
        int expert = misses[found + rank - 1], old = p.row_of[at];
        if (old >= 0) p.slot_of[old] = -1;
        p.row_of[at] = p.first_row + expert;
        p.uses[at] = 0;
        slot_of[expert] = at;
        p.fetch_rows[found + rank - 1] = p.first_row + expert;
        p.fetch_slots[found + rank - 1] = at;
      } else {
        p.uses[at]--;
      }
    }
    found += taken;
    hand += last + 1;
    if (hand >= p.slots) hand -= p.slots;
    sync_threads();
  }
  if (p.requests && found > 0) {
    unsigned count = *p.num_posted;
    if (t < found) p.requests[1 + (count + t) % p.request_slots] = p.fetch_rows[t];
    sync_threads();
    if (t == 0) {
      *p.num_posted = count + found;
      store_release_system(p.requests, static_cast<int>(count + found));
    }
  }
  sync_threads();
  before_lists();
  fill_lists(p, slot_of);
  if (t == 0) {
    *p.hand = hand;
    *p.num_fetch = found;
    p.counters[0] += num_wanted - needed;
    p.counters[1] += needed;
    if (found < needed) atomic_or(p.error, ERROR_CAPACITY);
  }
}
KERNEL(RESOLVE_THREADS, 1) resolve_experts(GRID_CONSTANT ResolveArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  resolve(p, [] {});
}
LAUNCHABLE(resolve_experts, ResolveArgs, RESOLVE_THREADS)

constexpr int FETCH_THREADS = 256;
constexpr int LOADS = 4;  // of 16 bytes that a thread has under way
constexpr int MAX_FETCH = 1024;

struct FetchArgs {
  uint8_t* pool;             // [slots, row_bytes]
  const uint64_t* chunks;    // addresses of chunks of rows in host memory
  const int* place_of;       // [rows of all layers], mapped: -1 not here yet, -2 never
  const int* fetch_rows;
  const int* fetch_slots;
  const int* num_fetch;
  int64_t* slot_of;              // [rows of all layers]; a row that did not come loses its slot
  int* row_of;                   // [slots]
  unsigned long long* counters;  // of the layer
  uint32_t* ctas_done;           // 0 between fetches
  uint32_t* error;
  int64_t row_bytes, timeout_ns;
  int rows_per_chunk, waits;  // waits: rows may come while this runs
};

// The place of a row that was not there at first; -1 once time is over.
DEVICE int wait_for_row(const FetchArgs& p, int row, int64_t until) {
  for (;;) {
    int place = load_acquire_system(p.place_of + row);
    if (place >= 0) return place;
    if (place == -2 || now_ns() > until) {
      atomic_or(p.error, place == -2 ? ERROR_READ : ERROR_TIMEOUT);
      return -1;
    }
    rest();
  }
}

template <int THREADS, bool FRESH>
DEVICE void copy_piece(const FetchArgs& p, int entry, int place, int piece) {
  constexpr int BYTES = THREADS * LOADS * 16;
  int64_t first = int64_t(piece) * BYTES, left = p.row_bytes - first;
  int count = static_cast<int>(left < BYTES ? left : BYTES) / 16;
  const uint8_t* chunk = reinterpret_cast<const uint8_t*>(p.chunks[place / p.rows_per_chunk]);
  const uint8_t* row = chunk + place % p.rows_per_chunk * p.row_bytes;
  const uint4* from = reinterpret_cast<const uint4*>(row + first);
  uint4* to = reinterpret_cast<uint4*>(p.pool + p.fetch_slots[entry] * p.row_bytes + first);
  uint4 v[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    int at = threadIdx.x + i * THREADS;
    if (at < count) v[i] = FRESH ? load_from_host(from + at) : load_streaming(from + at);
  }
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    int at = threadIdx.x + i * THREADS;
    if (at < count) to[at] = v[i];
  }
}

// Pieces of all rows that are in host memory go round the CTAs, then those of rows that come from disk.
template <int THREADS>
DEVICE void fetch(const FetchArgs& p) {
  int* places = reinterpret_cast<int*>(dynamic_shared());
  int* late = places + MAX_FETCH;
  int n = *p.num_fetch;
  if (n == 0) return;
  int64_t begin = now_ns();
  for (int i = threadIdx.x; i < n; i += THREADS) {
    places[i] = load_acquire_system(p.place_of + p.fetch_rows[i]);
    late[i] = places[i] < 0;
  }
  sync_threads();
  int pieces = static_cast<int>((p.row_bytes + THREADS * LOADS * 16 - 1) / (THREADS * LOADS * 16));
  for (int item = blockIdx.x; item < n * pieces; item += gridDim.x)
    if (!late[item / pieces])
      copy_piece<THREADS, false>(p, item / pieces, places[item / pieces], item % pieces);
  int64_t until = begin + p.timeout_ns;
  for (int entry = 0; entry < n; entry++) {
    if (!late[entry]) continue;
    if (threadIdx.x == 0) places[entry] = wait_for_row(p, p.fetch_rows[entry], p.waits ? until : 0);
    sync_threads();
    int place = places[entry];
    if (place < 0) {  // whoever gave up on it: what the slot holds is nobody's
      if (threadIdx.x == 0) {
        p.slot_of[p.fetch_rows[entry]] = -1;
        p.row_of[p.fetch_slots[entry]] = -1;
      }
      continue;
    }
    // The same pieces as above, as CTAs may differ in which rows they find late.
    for (int piece = 0; piece < pieces; piece++)
      if ((entry * pieces + piece) % gridDim.x == blockIdx.x)
        copy_piece<THREADS, true>(p, entry, place, piece);
  }
  sync_threads();
  if (threadIdx.x == 0) {
    fence_device();
    if (atomic_add(p.ctas_done, 1) == gridDim.x - 1) {
      *p.ctas_done = 0;
      p.counters[2] += now_ns() - begin;
    }
  }
}
KERNEL(FETCH_THREADS, 2) fetch_experts(GRID_CONSTANT FetchArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  fetch<FETCH_THREADS>(p);
}
LAUNCHABLE(fetch_experts, FetchArgs, FETCH_THREADS)

struct BringArgs {
  ResolveArgs resolve;
  FetchArgs fetch;
  uint32_t* ready;  // whether the list is made, CTAs that saw the old one and that are through; zeros
                    // between launches
};

// Tells the other CTAs that the list is made, copies rows with them, and leaves zeros behind.
DEVICE void share_list(const BringArgs& p) {
  bool first = blockIdx.x == 0, tells = threadIdx.x == 0;
  sync_threads();
  if (first && tells) add_released(p.ready, 1);
  if (!first && tells)
    while (!wait_until(p.ready, 1)) continue;
  sync_threads();
  fetch<RESOLVE_THREADS>(p.fetch);
  sync_threads();
  if (tells && atomic_add(p.ready + 2, 1) == gridDim.x - 1) p.ready[0] = p.ready[1] = p.ready[2] = 0;
}

// Whether all listed experts have slots, as every warp finds out by itself; if so, and `touches`, the
// books are kept here.
DEVICE bool all_there(const ResolveArgs& p, bool touches) {
  int lane = threadIdx.x & 31, most = p.pairs <= p.experts ? p.pairs : p.experts + 1;
  int count = static_cast<int>(load_fresh(reinterpret_cast<const uint32_t*>(p.num_listed[0]))), slots[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < 2; n++)
    if (lane + 32 * n < most)
      slots[n] = static_cast<int>(load_fresh(reinterpret_cast<const uint4*>(p.listed[0] + lane + 32 * n)).x);
  bool missing = count > 64 || (lane < count && slots[0] < 0) || (lane + 32 < count && slots[1] < 0);
  if (warp_max(missing)) return false;
  if (!touches) return true;
#pragma unroll
  for (int n = 0; n < 2; n++)
    if (lane + 32 * n < count && p.uses[slots[n]] < MAX_USES) p.uses[slots[n]]++;
  if (lane == 0) {
    *p.num_fetch = 0;
    p.counters[0] += count;
  }
  return true;
}

// Both in one launch: the first CTA finds slots while the others wait for its list; they are few enough
// to be on the chip together. Where nothing is missing, which the list of the chosen experts tells,
// every CTA leaves at once; otherwise that list may not change before all of them have seen it.
KERNEL(RESOLVE_THREADS, 1) bring_experts(GRID_CONSTANT BringArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (all_there(p.resolve, blockIdx.x == 0 && threadIdx.x < 32)) return;
  sync_threads();
  if (blockIdx.x) {
    if (threadIdx.x == 0) add_released(p.ready + 1, 1);
  } else {
    resolve(p.resolve, [&] {
      if (threadIdx.x == 0)
        while (!wait_until(p.ready + 1, gridDim.x - 1)) continue;
      sync_threads();
    });
  }
  share_list(p);
}
COOPERATING(bring_experts, BringArgs, RESOLVE_THREADS)

constexpr int RECORD_THREADS = 256;

struct RecordArgs {
  const int64_t* expert_ids;  // [pairs]
  unsigned* num_posted;       // numbers so far
  int* ring;                  // mapped: a copy of num_posted, and that many of the last numbers
  int pairs, layer, ring_slots;
};

// What a layer was asked for, to a thread of the host: the layer, how many ids, and they.
KERNEL(RECORD_THREADS, 1) record_experts(GRID_CONSTANT RecordArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  unsigned first = *p.num_posted, next = first + 2 + p.pairs;
  int* ring = p.ring + 1;
  for (int i = threadIdx.x; i < p.pairs; i += RECORD_THREADS)
    ring[(first + 2 + i) % p.ring_slots] = static_cast<int>(p.expert_ids[i]);
  if (threadIdx.x == 0) {
    ring[first % p.ring_slots] = p.layer;
    ring[(first + 1) % p.ring_slots] = p.pairs;
  }
  sync_threads();
  if (threadIdx.x == 0) {
    *p.num_posted = next;
    store_release_system(p.ring, static_cast<int>(next));
  }
}
LAUNCHABLE(record_experts, RecordArgs, RECORD_THREADS)
