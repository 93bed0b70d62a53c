// The Hopper MMA for 32 tokens, of which only the streaming GEMM has instances.
#pragma once
#include "mma.cuh"

#if MOET_SM == 90 && !defined(MOET_EMULATE)
#define WGMMA_N32(shape, tail)                                                                      \
  asm volatile(                                                                                     \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32" shape          \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1"     \
      tail ";\n}\n"                                                                                 \
      : ACC16(d, 0)                                                                                 \
      : A4(a), "l"(b.descriptor()), "r"(add))
template <>
DEVICE void mma<BF16, 4>(float* d, const uint32_t* a, BOperand b, int add) {
  WGMMA_N32("k16.f32.bf16.bf16", ", 0");
}
template <>
DEVICE void mma<FP8, 4>(float* d, const uint32_t* a, BOperand b, int add) {
  WGMMA_N32("k32.f32.e4m3.e4m3", "");
}
#endif
