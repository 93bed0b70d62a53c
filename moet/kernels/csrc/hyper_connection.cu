// From one sublayer's output to the next one's input: streams mixed, gates projected, streams
// collapsed, normed and rounded to e4m3. Four streams. See hyper_connection.py and device_streams.py.
// Here stand the kernels; what they do is in the headers.
#include "hyper_step.cuh"
#include "hyper_tell.cuh"
#include "hyper_tiles.cuh"

KERNEL(STEP_THREADS, 2) streams_step(GRID_CONSTANT StreamsArgs p) { run_step<false>(p); }
LAUNCHABLE(streams_step, StreamsArgs, STEP_THREADS)
KERNEL(STEP_THREADS, 1) streams_step_held(GRID_CONSTANT StreamsArgs p) { run_step<true>(p); }
LAUNCHABLE(streams_step_held, StreamsArgs, STEP_THREADS)

KERNEL(TELL_THREADS, 4) streams_tell(GRID_CONSTANT StreamsArgs p) { run_tell<false>(p); }
LAUNCHABLE(streams_tell, StreamsArgs, TELL_THREADS)
KERNEL(TELL_THREADS, 4) streams_tell_mixed(GRID_CONSTANT StreamsArgs p) { run_tell<true>(p); }
LAUNCHABLE(streams_tell_mixed, StreamsArgs, TELL_THREADS)

// A row's matrix that was left as its logits, for who cannot balance it.
KERNEL(32, 1) streams_balance(GRID_CONSTANT StreamsArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x == 0) balance_logits(p, blockIdx.x, p.next_mix + blockIdx.x * MULT * MULT);
}
LAUNCHABLE(streams_balance, StreamsArgs, 32)

KERNEL(TILE_THREADS, 1) streams_tiles(GRID_CONSTANT StreamsArgs p) { run_tiles<false>(p); }
LAUNCHABLE(streams_tiles, StreamsArgs, TILE_THREADS)
#if MOET_SM == 90  // whose CTAs have room for the parts
KERNEL(TILE_THREADS, 1) streams_tiles_mixed(GRID_CONSTANT StreamsArgs p) { run_tiles<true>(p); }
LAUNCHABLE(streams_tiles_mixed, StreamsArgs, TILE_THREADS)
#endif

// A CTA a row: what streams_tiles left.
KERNEL(STEP_THREADS, 4) streams_finish(GRID_CONSTANT StreamsArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  finish_row(p, blockIdx.x, reinterpret_cast<float*>(dynamic_shared()), SiteValues<false>());
}
LAUNCHABLE(streams_finish, StreamsArgs, STEP_THREADS)
