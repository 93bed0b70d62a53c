// Sums and gathers of small tensors over the ranks of one host through memory that all can write:
// see comm.py.
//
// A rank pushes its own values to every other rank, eight bytes at a time with the number of the
// call beside each four, and takes the others' out of its own window as soon as they bear that
// number: no flags, no fences, no barriers, one way over the link. Terms are added as (0 + 1) +
// (2 + 3), so that every rank has the same bits. Two halves of a window take turns: a rank writes a
// half again only after it has had something of the call between from everybody, which they sent
// after all of their threads had read that half.
#include "peers.cuh"

constexpr int COMM_THREADS = 256;

struct CommArgs {
  const Pair* x;
  void* out;
  PeerArgs peers;  // turns: [CTAs]
  int pairs;
  int per_row;    // pairs of a row, for gathers
  int from_bf16;  // terms are bf16, four to a pair, and so are sums
  int to_bf16;    // sums of fp32 terms leave as bf16
};

// Hands this rank's pairs to all others; returns the turn.
DEVICE uint32_t push_all(const CommArgs& p, int first, int step) {
  uint32_t turn = p.peers.turns[blockIdx.x] + 1;
  for (int i = first; i < p.pairs; i += step) push_to_all(p.peers, turn, i, p.x[i]);
  sync_threads();  // all have read the turn
  if (threadIdx.x == 0) p.peers.turns[blockIdx.x] = turn;
  return turn;
}

KERNEL(COMM_THREADS, 1) all_reduce(GRID_CONSTANT CommArgs p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int first = blockIdx.x * COMM_THREADS + threadIdx.x, step = gridDim.x * COMM_THREADS;
  int ranks = p.peers.ranks;
  uint32_t turn = push_all(p, first, step);
  for (int i = first; i < p.pairs; i += step) {
    Pair own = p.x[i];
    if (p.from_bf16) {
      Pair sum;
      if (!sum_of_bf16(p.peers, turn, i, own, sum)) return;
      static_cast<Pair*>(p.out)[i] = sum;
      continue;
    }
    uint32_t low[MAX_RANKS], high[MAX_RANKS];
    if (!take_all(p.peers, turn, i, own, low, high)) return;
    if (p.to_bf16) {
      float a = bits_float(tree(low, ranks)), b = bits_float(tree(high, ranks));
      static_cast<uint32_t*>(p.out)[i] = bf16s(a, b);
    } else {
      static_cast<Pair*>(p.out)[i] = {tree(low, ranks), tree(high, ranks)};
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
    Pair* out = static_cast<Pair*>(p.out) + static_cast<int64_t>(row) * p.peers.ranks * p.per_row + column;
    for (int from = 0; from < p.peers.ranks; from++) {
      Pair value;
      if (from == p.peers.rank) value = p.x[i];
      else if (!take(p.peers, from, turn, i, value)) return;
      out[from * p.per_row] = value;
    }
  }
}
LAUNCHABLE(all_gather, CommArgs, COMM_THREADS)
