// The machine under the kernels: loads, copies, barriers and matrix units, one small wrapper each.
// Kernel bodies are plain C++ on top of this; emulation.h gives the same names on a CPU.
#pragma once
#include <cstdint>

#ifdef MOET_EMULATE
#include "emulation.h"
#else
#include <cuda_bf16.h>

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, ctas) extern "C" __global__ void __launch_bounds__(threads, ctas)
#define GRID_CONSTANT const __grid_constant__
#define LAUNCHABLE(name, Args, threads)

DEVICE uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t bytes[];
  return bytes;
}
DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
DEVICE void sync_threads() { __syncthreads(); }
// Among `threads` threads that name the same barrier, 1..15; the CTA's own is 0.
template <int THREADS_THERE>
DEVICE void sync_named(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS_THERE) : "memory");
}
// Of the 128 threads of a warpgroup; `group` is the warpgroup's number in its CTA.
DEVICE void sync_warpgroup(int group) { sync_named<128>(group + 1); }
DEVICE void sync_warp() { __syncwarp(); }

// A barrier in shared memory that counts arrivals and copied bytes.
DEVICE void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
DEVICE void barriers_are_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void barrier_arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Until the phase of this parity has ended.
DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Registers of a warpgroup, given back or taken; every warp of it must call.
template <int REGISTERS>
DEVICE void give_registers() {
#if MOET_SM == 90
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS>
DEVICE void take_registers() {
#if MOET_SM == 90
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
// Bytes a multiple of 16, by the copy engine; the barrier learns when they are here.
DEVICE void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Copies of 16 or 4 bytes into shared memory; `valid` false writes zeros and reads nothing.
DEVICE void copy16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
DEVICE void copy4(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
DEVICE uint4 load_streaming(const uint4* p) { return __ldcs(p); }
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

DEVICE uint32_t shuffle(uint32_t value, int lane) { return __shfl_sync(~0u, value, lane); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
DEVICE uint32_t warp_max(uint32_t v) { return __reduce_max_sync(~0u, v); }
DEVICE uint32_t warp_min(uint32_t v) { return __reduce_min_sync(~0u, v); }
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
// (a & mask) * factor + b in two instructions of different pipes; the compiler would make it three.
template <uint32_t MASK, uint32_t FACTOR>
DEVICE uint32_t masked_multiply_add(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("{\n.reg .b32 t;\nand.b32 t, %1, %2;\nmad.lo.u32 %0, t, %3, %4;\n}"
      : "=r"(r)
      : "r"(a), "n"(MASK), "n"(FACTOR), "r"(b));
  return r;
}
DEVICE uint32_t float_bits(float v) { return __float_as_uint(v); }
DEVICE float bits_float(uint32_t v) { return __uint_as_float(v); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float div_approx(float a, float b) { return __fdividef(a, b); }
DEVICE float sqrt_rn(float v) { return __fsqrt_rn(v); }
DEVICE float exp_precise(float v) { return expf(v); }
DEVICE float log1p_precise(float v) { return log1pf(v); }
DEVICE float exp_approx(float v) { return __expf(v); }
DEVICE uint16_t to_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
// e4m3 of lo in bits 7:0 and of hi in bits 15:8, round to nearest even, saturating.
DEVICE uint32_t to_e4m3x2(float lo, float hi) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}
DEVICE void fence_shared_for_matrix_units() {
#if MOET_SM == 90
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
DEVICE uint32_t atomic_add(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }
DEVICE void atomic_or(uint32_t* p, uint32_t v) { atomicOr(p, v); }
DEVICE void fence_device() { __threadfence(); }
DEVICE float load_volatile(const float* p) { return __ldcg(p); }
DEVICE void trap_in_debug() {
#ifdef MOET_DEBUG
  __trap();
#endif
}
#endif
