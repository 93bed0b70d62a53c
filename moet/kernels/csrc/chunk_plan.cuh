// The work list of a chunk's experts: pairs sorted by expert, cut into tiles of rows. A CTA an expert; each
// counts all pairs, so that none waits for another, and writes its own in their order. Counts alone are
// added atomically, in any order to the same end.
#pragma once
#include "device.cuh"

constexpr int CHUNK_PLAN_THREADS = 1024;
constexpr int CHUNK_EXPERTS = 1024;

struct ChunkPlanArgs {
  const int64_t* expert_ids;  // [pairs], all in range
  const int64_t* slot_of;     // [experts]
  int* entries;               // [room][4]: slot, expert, first place, rows
  int* num_entries;
  int* places;                // [pairs]: the pairs in the order of the entries
  int pairs, experts, rows;   // rows: most of an entry
  int each;                   // pairs that a thread looks through: even, its half odd
};

struct ChunkPlan {
  const ChunkPlanArgs& p;
  int tid, expert;

  DEVICE ChunkPlan(const ChunkPlanArgs& args) : p(args), tid(threadIdx.x), expert(blockIdx.x) {}

  DEVICE static uint32_t* counts() { return reinterpret_cast<uint32_t*>(dynamic_shared()); }
  DEVICE static uint32_t* sums() { return counts() + CHUNK_EXPERTS; }  // place, entry, entries
  DEVICE static int* ends(int which) { return reinterpret_cast<int*>(sums() + 4) + which * CHUNK_PLAN_THREADS; }
  DEVICE static uint16_t* ids() { return reinterpret_cast<uint16_t*>(ends(2)); }
  DEVICE int tiles(int count) const { return (count + p.rows - 1) / p.rows; }

  DEVICE void run() {
    wait_for_previous_kernel();
    let_next_kernel_start();
    counts()[tid] = 0;
    if (tid < 4) sums()[tid] = 0;
    sync_threads();
    for (int i = tid; i < p.pairs; i += CHUNK_PLAN_THREADS) {
      int id = static_cast<int>(p.expert_ids[i]);
      ids()[i] = static_cast<uint16_t>(id);
      atomic_add(counts() + id, 1);
    }
    sync_threads();
    if (tid < p.experts) {
      int count = counts()[tid];
      if (tid < expert) atomic_add(sums(), count), atomic_add(sums() + 1, tiles(count));
      atomic_add(sums() + 2, tiles(count));
    }
    sync_threads();
    if (expert == 0 && tid == 0) *p.num_entries = sums()[2];
    write_entries();
    write_places();
  }

  // As few entries as the pairs allow, all but the last of the same size, a multiple of 8.
  DEVICE void write_entries() const {
    int count = counts()[expert], mine = tiles(count);
    if (mine == 0) return;
    int size = (count + 8 * mine - 1) / (8 * mine) * 8;
    for (int i = tid; i < mine; i += CHUNK_PLAN_THREADS) {
      int left = count - i * size, *to = p.entries + 4 * (sums()[1] + i);
      to[0] = static_cast<int>(p.slot_of[expert]), to[1] = expert;
      to[2] = sums()[0] + i * size, to[3] = left < size ? left : size;
    }
  }

  // Every thread looks through neighbouring pairs, and finds out how many are ahead of its own.
  DEVICE void write_places() const {
    int first = tid * p.each, last = first + p.each < p.pairs ? first + p.each : p.pairs, found = 0;
    for (int i = first; i < last; i++) found += ids()[i] == expert;
    int which = 0;
    ends(0)[tid] = found;
    sync_threads();
    for (int step = 1; step < CHUNK_PLAN_THREADS; step *= 2, which ^= 1) {
      ends(which ^ 1)[tid] = ends(which)[tid] + (tid >= step ? ends(which)[tid - step] : 0);
      sync_threads();
    }
    int place = sums()[0] + ends(which)[tid] - found;
    for (int i = first; i < last; i++)
      if (ids()[i] == expert) p.places[place++] = i;
  }
};
