// What only the prefill GEMM asks of the machine: matrix instructions of up to 128 tokens, and a store
// that turns their results around. The same names on a CPU.
#pragma once
#include "mma.cuh"

// Token groups (of 8) that a tile of `groups` is computed as: the shapes that are instantiated.
DEVICE constexpr int tile_groups(int groups) {
#if defined(MOET_EMULATE) || defined(MOET_FEW_WIDTHS)  // for the compiler's sake; to compare
  return groups > 12 ? 16 : groups > 4 ? (groups + 3) / 4 * 4 : 4;
#else
  return groups > 14 ? 16 : groups > 9 && groups < 14 ? groups : (groups + 1) / 2 * 2;
#endif
}

#ifdef MOET_EMULATE  // where nothing runs at the same time
template <int COUNT>
DEVICE void results_are_here(float*) {}
// Two 16-byte rows of a lane's matrix pair: lane l < 16 names row l of two 8 x 8 matrices of 16 bits.
DEVICE void store_transposed(void* to, uint32_t first, uint32_t second) {
  auto& offer = emulation::mine();
  offer.a[0] = first, offer.a[1] = second, offer.b_shared = static_cast<uint8_t*>(to);
  emulation::meet([](emulation::Offer* o) {
    for (int m = 0; m < 2; m++)
      for (int column = 0; column < 8; column++) {
        auto* row = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(o[8 * m + column].b_shared));
        for (int g = 0; g < 8; g++) row[g] = o[4 * g + column / 2].a[m] >> (16 * (column & 1));
      }
  });
}
#else
// Results of matrix instructions are touched only below this, whatever the compiler would like.
template <int COUNT>
DEVICE void results_are_here(float* d) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
DEVICE void store_transposed(void* to, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(shared_address(to)),
               "r"(first), "r"(second)
               : "memory");
}
#endif

#if MOET_SM == 90 && !defined(MOET_EMULATE)
#define D0 "%0,%1,%2,%3"
#define D1 D0 ",%4,%5,%6,%7"
#define D2 D1 ",%8,%9,%10,%11"
#define D3 D2 ",%12,%13,%14,%15"
#define D4 D3 ",%16,%17,%18,%19"
#define D5 D4 ",%20,%21,%22,%23"
#define D6 D5 ",%24,%25,%26,%27"
#define D7 D6 ",%28,%29,%30,%31"
#define D8 D7 ",%32,%33,%34,%35"
#define D9 D8 ",%36,%37,%38,%39"
#define D10 D9 ",%40,%41,%42,%43"
#define D11 D10 ",%44,%45,%46,%47"
#define D12 D11 ",%48,%49,%50,%51"
#define D13 D12 ",%52,%53,%54,%55"
#define D14 D13 ",%56,%57,%58,%59"
#define D15 D14 ",%60,%61,%62,%63"

// list: the accumulators; then the numbers of the operands after them.
#define WIDE(n, kind, tail, list, a0, a1, a2, a3, descriptor_at, add_at, ...)                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #add_at ", 0;\nwgmma.mma_async.sync.aligned.m64" #n     \
               kind " {" list "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #descriptor_at ", p, 1, 1" tail  \
               ";\n}\n"                                                                                  \
               : __VA_ARGS__                                                                              \
               : A4(a), "l"(b.descriptor()), "r"(add))
#define WIDE_SHAPES(kind, tail)                                                                                                                   \
  if constexpr (NT == 2) WIDE(n16, kind, tail, D1, 8, 9, 10, 11, 12, 13, ACC4(d, 0), ACC4(d, 4));                                                 \
  if constexpr (NT == 4) WIDE(n32, kind, tail, D3, 16, 17, 18, 19, 20, 21, ACC16(d, 0));                                                          \
  if constexpr (NT == 6) WIDE(n48, kind, tail, D5, 24, 25, 26, 27, 28, 29, ACC16(d, 0), ACC4(d, 16), ACC4(d, 20));                                \
  if constexpr (NT == 8) WIDE(n64, kind, tail, D7, 32, 33, 34, 35, 36, 37, ACC16(d, 0), ACC16(d, 16));                                            \
  if constexpr (NT == 10) WIDE(n80, kind, tail, D9, 40, 41, 42, 43, 44, 45, ACC16(d, 0), ACC16(d, 16), ACC4(d, 32), ACC4(d, 36));                 \
  if constexpr (NT == 11) WIDE(n88, kind, tail, D10, 44, 45, 46, 47, 48, 49, ACC16(d, 0), ACC16(d, 16), ACC4(d, 32), ACC4(d, 36), ACC4(d, 40));   \
  if constexpr (NT == 12) WIDE(n96, kind, tail, D11, 48, 49, 50, 51, 52, 53, ACC16(d, 0), ACC16(d, 16), ACC16(d, 32));                            \
  if constexpr (NT == 13) WIDE(n104, kind, tail, D12, 52, 53, 54, 55, 56, 57, ACC16(d, 0), ACC16(d, 16), ACC16(d, 32), ACC4(d, 48));              \
  if constexpr (NT == 14) WIDE(n112, kind, tail, D13, 56, 57, 58, 59, 60, 61, ACC16(d, 0), ACC16(d, 16), ACC16(d, 32), ACC4(d, 48), ACC4(d, 52)); \
  if constexpr (NT == 16) WIDE(n128, kind, tail, D15, 64, 65, 66, 67, 68, 69, ACC16(d, 0), ACC16(d, 16), ACC16(d, 32), ACC16(d, 48));            

template <int CODEC, int NT>
DEVICE void wide_mma(float* d, const uint32_t* a, BOperand b, int add) {
  if constexpr (CODEC == BF16) {
    WIDE_SHAPES("k16.f32.bf16.bf16", ", 0")
  } else if constexpr (CODEC == FP8) {
    WIDE_SHAPES("k32.f32.e4m3.e4m3", "")
  } else {
    WIDE_SHAPES("k32.f32.e5m2.e4m3", "")
  }
}
#elif MOET_SM == 90
template <int CODEC, int NT>
DEVICE void wide_mma(float* d, const uint32_t* a, BOperand b, int add) {
  mma<CODEC, NT>(d, a, b, add);
}
#endif

// chunk_mma for any number of token groups that tile_groups gives.
template <int CODEC, int NT, int PAIR>
DEVICE void wide_chunk(float* part, const uint32_t (*a)[4], BOperand b, const RowScale& s) {
#if MOET_SM == 90
#pragma unroll
  for (int j = 0; j < 4; j++) wide_mma<CODEC, NT>(part, a[j], b_advance(b, 256 * j), j > 0);
#else
  chunk_mma<CODEC, NT, PAIR>(part, a, b, s);
#endif
}
