// The two matrix back ends behind one call: acc[NT][4] (+)= A (16 rows of this warp) x B (8 NT tokens).
// B lies in shared memory as [NT groups][column blocks of 16 bytes][8 tokens][16 bytes]; within 32
// bytes of a token, word 4h + t holds natural word 2t + h. NT is 1 or 2, for prefill 16 (sm_120a: 8).
#pragma once
#include "codec.cuh"

#ifdef MOET_EMULATE
#include "emulation_mma.h"
#else
#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(d, i) ACC4(d, i), ACC4(d, i + 4), ACC4(d, i + 8), ACC4(d, i + 12)
#define A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

#if MOET_SM == 90
struct BOperand {  // the halves of a shared-memory descriptor; only the low one moves
  uint32_t low, high;
  DEVICE uint64_t descriptor() const { return low | (static_cast<uint64_t>(high) << 32); }
};
// group_bytes: from one group of 8 tokens to the next.
DEVICE BOperand b_operand(const uint8_t* shared, uint32_t group_bytes) {
  return {((shared_address(shared) >> 4) & 0x3FFF) | (8u << 16), group_bytes >> 4};
}
DEVICE BOperand b_advance(BOperand b, uint32_t bytes) { return {b.low + (bytes >> 4), b.high}; }
DEVICE void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define WGMMA_N8(shape, tail)                                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\nwgmma.mma_async.sync.aligned.m64n8" shape \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1" tail ";\n}\n"                        \
               : ACC4(d, 0)                                                                    \
               : A4(a), "l"(b.descriptor()), "r"(add))
#define WGMMA_N16(shape, tail)                                                                        \
  asm volatile(                                                                                 \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16" shape      \
      " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1" tail ";\n}\n"                   \
      : ACC4(d, 0), ACC4(d, 4)                                                                  \
      : A4(a), "l"(b.descriptor()), "r"(add))
#define WGMMA_N128(shape, tail)                                                                       \
  asm volatile(                                                                                 \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128" shape     \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"  \
      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"                 \
      " {%64,%65,%66,%67}, %68, p, 1, 1" tail ";\n}\n"                                            \
      : ACC16(d, 0), ACC16(d, 16), ACC16(d, 32), ACC16(d, 48)                                   \
      : A4(a), "l"(b.descriptor()), "r"(add))
template <int CODEC, int NT>
DEVICE void mma(float* d, const uint32_t* a, BOperand b, int add) {
  static_assert(NT == 1 || NT == 2 || NT == 16, "token groups");
  if constexpr (CODEC == BF16) {
    if constexpr (NT == 1) WGMMA_N8("k16.f32.bf16.bf16", ", 0");
    if constexpr (NT == 2) WGMMA_N16("k16.f32.bf16.bf16", ", 0");
    if constexpr (NT == 16) WGMMA_N128("k16.f32.bf16.bf16", ", 0");
  } else if constexpr (CODEC == FP8) {
    if constexpr (NT == 1) WGMMA_N8("k32.f32.e4m3.e4m3", "");
    if constexpr (NT == 2) WGMMA_N16("k32.f32.e4m3.e4m3", "");
    if constexpr (NT == 16) WGMMA_N128("k32.f32.e4m3.e4m3", "");
  } else {
    if constexpr (NT == 1) WGMMA_N8("k32.f32.e5m2.e4m3", "");
    if constexpr (NT == 2) WGMMA_N16("k32.f32.e5m2.e4m3", "");
    if constexpr (NT == 16) WGMMA_N128("k32.f32.e5m2.e4m3", "");
  }
}

#else  // MOET_SM == 120
struct BOperand {
  const uint8_t* lane;  // this lane's word of the first group
  uint32_t group_bytes;
};
DEVICE BOperand b_operand(const uint8_t* shared, uint32_t group_bytes) {
  return {shared + (threadIdx.x & 31) * 4, group_bytes};
}
DEVICE BOperand b_advance(BOperand b, uint32_t bytes) { return {b.lane + bytes, b.group_bytes}; }
DEVICE void mma_begin() {}
DEVICE void mma_commit() {}
template <int N>
DEVICE void mma_wait() {}

#define MMA_SF(type)                                                                              \
  asm volatile(                                                                                   \
      "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32." type       \
      ".e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%13}, "    \
      "{%11}, {%14,%15};"                                                                         \
      : ACC4(d, 0)                                                                                \
      : A4(a), "r"(b0), "r"(b1), "r"(scale), "r"(0x7F7F7F7Fu), "n"(BYTE), "n"(PAIR), "n"(0), "n"(0))

// One group of 8 tokens. scale: this lane's scale-A register; BYTE, PAIR: its selectors.
template <int CODEC, int BYTE, int PAIR>
DEVICE void mma_group(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, uint32_t scale) {
  if constexpr (CODEC == BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : ACC4(d, 0)
        : A4(a), "r"(b0), "r"(b1));
  } else if constexpr (CODEC == FP8) {
    MMA_SF("e4m3");
  } else {
    MMA_SF("e5m2");
  }
}
#endif
#endif  // MOET_EMULATE

#if MOET_SM == 120
template <int CODEC, int NT, int BYTE, int PAIR>
DEVICE void mma_scaled(float* d, const uint32_t* a, BOperand b, int add, uint32_t scale) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const uint8_t* p = b.lane + n * b.group_bytes;
    uint32_t b0 = *reinterpret_cast<const uint32_t*>(p);
    uint32_t b1 = *reinterpret_cast<const uint32_t*>(p + 128);
    if (!add) d[4 * n] = d[4 * n + 1] = d[4 * n + 2] = d[4 * n + 3] = 0.0f;
    mma_group<CODEC, BYTE, PAIR>(d + 4 * n, a, b0, b1, scale);
  }
}
#endif

// The A operand of a chunk from its stored words, then four matrix instructions.
struct RowScale {
  uint32_t word0, word1;  // sm_90a: exponents (times 4) of rows g and g + 8, a byte per 32 columns
  uint32_t lane;          // sm_120a: this lane's scale-A register
};

template <int CODEC>
DEVICE void decode_block(const uint32_t* words, int j, const RowScale& s, const Masks& m,
                         uint32_t* a) {
  if constexpr (CODEC == W2) {
#if MOET_SM == 90
    uint32_t spread = 0x1111u * j;
    decode_w2_scaled(words[j], permute(s.word0, 0, spread), permute(s.word1, 0, spread), a);
#else
    decode_w2(words[j], m.high, m.w2_base, a);
#endif
  } else if constexpr (CODEC == MXFP4) {
#if MOET_SM == 90
    uint32_t spread = 0x1111u * j;
    uint32_t e0 = permute(s.word0, 0, spread), e1 = permute(s.word1, 0, spread);
#else
    uint32_t e0 = 14 * 0x04040404u, e1 = e0;
#endif
    uint32_t l0 = e2m1_low(e0), h0 = e2m1_high(e0), l1 = e2m1_low(e1), h1 = e2m1_high(e1);
    decode_e2m1(words[2 * j], l0, h0, l1, h1, a);
    decode_e2m1(words[2 * j + 1], l0, h0, l1, h1, a + 2);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = words[4 * j + i];
  }
}

// PAIR: which half of the lane's scale word this chunk uses (sm_120a).
template <int CODEC, int NT, int PAIR>
DEVICE void chunk_mma(float* part, const uint32_t (*a)[4], BOperand b, const RowScale& s) {
#if MOET_SM == 90
#pragma unroll
  for (int j = 0; j < 4; j++) mma<CODEC, NT>(part, a[j], b_advance(b, 256 * j), j > 0);
#else
  uint32_t scale = has_scale_plane(CODEC) ? s.lane : 0x7F7F7F7Fu;
  mma_scaled<CODEC, NT, 0, PAIR>(part, a[0], b, 0, scale);
  mma_scaled<CODEC, NT, 1, PAIR>(part, a[1], b_advance(b, 256), 1, scale);
  mma_scaled<CODEC, NT, 2, PAIR>(part, a[2], b_advance(b, 512), 1, scale);
  mma_scaled<CODEC, NT, 3, PAIR>(part, a[3], b_advance(b, 768), 1, scale);
#endif
}

// What the accumulators of a row must be multiplied with once its columns are summed.
template <int CODEC>
DEVICE float row_factor(uint32_t base) {
#if MOET_SM == 90
  if constexpr (CODEC == W2) return power_of_two(static_cast<int>(base) - 112);
  if constexpr (CODEC == MXFP4) return power_of_two(static_cast<int>(base) - 113);
  return 1.0f;
#else
  return CODEC == W2 ? 0.25f : 1.0f;
#endif
}
