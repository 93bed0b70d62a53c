// One row that something joins. Its parts are told to the CTA that waits for them: a sum and its mark in
// one word, so that nothing is fenced or counted. Grid: the CTAs of run_step, and one that finishes the
// row. The matrix is left as its logits; the next launch balances it ahead of its wait. Streams, gates and
// matrix are older than the kernel ahead, so all but y is here when that ends.
#pragma once
#include "hyper_streams.cuh"

constexpr int TELL_THREADS = 256;
struct TellShared {
  uint4 held[MAX_GROUPS][MULT][TELL_THREADS];  // who finishes: a thread's channels of the streams
  uint2 mixed[MULT][32];                       // who multiplies: a lane's
  float gathered[8][PARTS];
  float mix[MULT * MULT], post[MULT], sums[8];
  float base[PARTS], scale[4];  // of the site
};

#ifdef MOET_EMULATE
DEVICE int part_of_cta(int) { return blockIdx.x; }
DEVICE void want(const void*) {}
DEVICE void tell(uint64_t* to, float sum) { *to = uint64_t(1) << 32 | float_bits(sum); }
DEVICE uint64_t ask(const uint64_t* from) {
  if (*from >> 32 == 0) emulation::pause(emulation::SPIN);
  return *from;
}
#else
// Who waits starts first and has most to prepare.
DEVICE int part_of_cta(int multiply) { return blockIdx.x ? blockIdx.x - 1 : multiply; }
// Brings a line as near as memory that all share.
DEVICE void want(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void tell(uint64_t* to, float sum) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t(1) << 32 | float_bits(sum)) : "memory");
}
DEVICE uint64_t ask(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
#endif

// The sums over all blocks as gather_parts makes them, once all are told. Who tells waits for nobody, so all
// are in the end; giving up would be a wrong sum.
DEVICE float gather_told(const StreamsArgs& p, float (*gathered)[PARTS]) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  bool mine = lane < MAX_OUTS || lane == PARTS - 1;
  uint64_t found[4];
  uint32_t marks = 0;
#pragma unroll 1
  while (!marks) {
    marks = 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int block = i * 8 + warp;
      found[i] = uint64_t(1) << 32;
      if (mine && block < blocks) found[i] = ask(p.told + block * PARTS + lane);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) marks &= static_cast<uint32_t>(found[i] >> 32);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int block = i * 8 + warp;
    if (block >= blocks) break;
    sum = add_rn(sum, bits_float(static_cast<uint32_t>(found[i])));
  }
  gathered[warp][lane] = sum;
  sync_threads();
  float total = gathered[0][lane];
#pragma unroll
  for (int w = 1; w < 8; w++) total = add_rn(total, gathered[w][lane]);
  return total;
}

// As the next launch wants to find them.
DEVICE void forget(const StreamsArgs& p) {
  for (int i = threadIdx.x; i < p.dim / BLOCK * PARTS; i += TELL_THREADS) p.told[i] = 0;
}

template <bool MIXED>
DEVICE uint2 load_joining(const StreamsArgs& p, int channel) {
  if constexpr (MIXED)
    return sum_of_parts<true>(p, 0, channel);
  else
    return load_pairs<true>(p.y + channel);
}

// One of run_step's CTAs: a warp has a stream to mix, then a row of fn.
template <bool MIXED>
struct Multiplies {
  const StreamsArgs& p;
  TellShared& s;
  int part, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  int block = part % blocks, out = part / blocks * 8 + warp;
  int channel = block * BLOCK + lane * 4;
  uint4 fn[MULT];
  uint2 old[MULT];

  DEVICE void load() {
#pragma unroll
    for (int k = 0; k < MULT; k++) {
      fn[k] = *reinterpret_cast<const uint4*>(p.fn + (uint64_t(out) * MULT + k) * p.dim + channel);
      old[k] = load_pairs<true>(p.streams + k * p.dim + channel);
    }
  }
  DEVICE void run() {
    if (warp < MULT) {
      uint2 y = load_joining<MIXED>(p, channel);
      s.mixed[warp][lane] = mix_four(old, y, s.post[warp], s.mix + warp);
    }
    sync_threads();
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int k = 0; k < MULT; k++) {
      Four v = unpack_four(s.mixed[k][lane]);
      uint32_t w[4] = {fn[k].x, fn[k].y, fn[k].z, fn[k].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum = fma_rn(bits_float(w[i]), v.v[i], sum);
        square = fma_rn(v.v[i], v.v[i], square);
      }
    }
    sum = warp_sum(sum), square = warp_sum(square);
    uint64_t* to = p.told + block * PARTS;
    if (lane == 0) {
      tell(to + out, sum);
      if (out == 0) tell(to + PARTS - 1, square);
    }
  }
};

// The CTA that is told.
template <bool MIXED>
struct Finishes {
  const StreamsArgs& p;
  TellShared& s;
  int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;

  static DEVICE uint2* half_of(uint4* p) { return reinterpret_cast<uint2*>(p); }
  DEVICE void load() {
    if (tid < MAX_OUTS) s.base[tid] = p.base[tid];
    if (tid < 3) s.scale[tid] = p.scale[tid];
#pragma unroll 1
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + tid) * 8;
      if (channel >= p.dim) break;
      want(p.weight + channel);
#pragma unroll
      for (int k = 0; k < MULT; k++)
        s.held[g][k][tid] = load_fresh(reinterpret_cast<const uint4*>(p.streams + k * p.dim + channel));
    }
  }
  static DEVICE void load_halves(const uint16_t* from, bool there, uint2& a, uint2& b) {
    uint4 u = {0, 0, 0, 0};
    if (there) u = load_fresh(reinterpret_cast<const uint4*>(from));
    a = {u.x, u.y}, b = {u.z, u.w};
  }
  // Four channels each, two and two in a row. Everything is asked for at once.
  DEVICE void load_joining(uint2* y) {
    if constexpr (MIXED) {
      Parts parts[2 * MAX_GROUPS];
      Shares shares;
      shares.choices = load_fresh(reinterpret_cast<const uint32_t*>(p.expert_ids) + 1) >> 31 ? 0 : p.top_k;
#pragma unroll
      for (int k = 0; k < MAX_PARTS; k++)
        shares.weight[k] = k < p.top_k && p.part_weights ? load_fresh(p.part_weights + k) : 1.0f;
#pragma unroll
      for (int g = 0; g < MAX_GROUPS; g++) {
        int channel = (g * 256 + tid) * 8;
        Parts *a = parts + 2 * g, *b = a + 1;
        load_halves(p.shared + channel, channel < p.dim, a->shared, b->shared);
        const uint16_t* from = p.parts + channel;
#pragma unroll
        for (int k = 0; k < MAX_PARTS; k++, from += p.dim)
          load_halves(from, channel < p.dim && k < p.top_k, a->part[k], b->part[k]);
      }
#pragma unroll
      for (int i = 0; i < 2 * MAX_GROUPS; i++) y[i] = add_parts(parts[i], shares);
    } else {
#pragma unroll
      for (int g = 0; g < MAX_GROUPS; g++) {
        int channel = (g * 256 + tid) * 8;
        load_halves(p.y + channel, channel < p.dim, y[2 * g], y[2 * g + 1]);
      }
    }
  }
  DEVICE void mix() {
    uint2 y[2 * MAX_GROUPS] = {};
    load_joining(y);
#pragma unroll 1
    for (int i = 0; i < 2 * MAX_GROUPS; i++) {
      int channel = (i / 2 * 256 + tid) * 8 + i % 2 * 4;
      if (channel >= p.dim) break;
      uint2 joining = i & 2 ? i & 1 ? y[3] : y[2] : i & 1 ? y[1] : y[0], old[MULT];
#pragma unroll
      for (int k = 0; k < MULT; k++) old[k] = half_of(&s.held[i / 2][k][tid])[i % 2];
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        uint2 stream = mix_four(old, joining, s.post[k], s.mix + k);
        half_of(&s.held[i / 2][k][tid])[i % 2] = stream;
        *reinterpret_cast<uint2*>(p.mixed + k * p.dim + channel) = stream;
      }
    }
  }
  DEVICE void run() {
    mix();
    uint4 weight[MAX_GROUPS][2] = {};
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + tid) * 8;
      const uint4* from = reinterpret_cast<const uint4*>(p.weight + channel);
      if (channel < p.dim) weight[g][0] = from[0], weight[g][1] = from[1];
    }
    float logit = mixing_logit(p, gather_told(p, s.gathered));
    float gate = sigmoid(fma_rn(logit, s.scale[lane >= MULT], lane < MAX_OUTS ? s.base[lane] : 0.0f));
    float pre[MULT], squares = 0.0f;
#pragma unroll
    for (int k = 0; k < MULT; k++) pre[k] = bits_float(shuffle(float_bits(gate + p.hc_eps), k));
#pragma unroll 1
    for (int g = 0; g < MAX_GROUPS; g++) {
      if ((g * 256 + tid) * 8 >= p.dim) break;
      uint32_t x[4];
      uint4 raw[MULT];
#pragma unroll
      for (int k = 0; k < MULT; k++) raw[k] = s.held[g][k][tid];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lo = 0.0f, hi = 0.0f;
#pragma unroll
        for (int k = 0; k < MULT; k++) {
          uint32_t pair = i == 0 ? raw[k].x : i == 1 ? raw[k].y : i == 2 ? raw[k].z : raw[k].w;
          lo = fma_rn(low(pair), pre[k], lo);
          hi = fma_rn(high(pair), pre[k], hi);
        }
        x[i] = packed(lo, hi);
        squares = fma_rn(low(x[i]), low(x[i]), squares);
        squares = fma_rn(high(x[i]), high(x[i]), squares);
      }
      s.held[g][0][tid] = {x[0], x[1], x[2], x[3]};
    }
    squares = warp_sum(squares);
    if (lane == 0) s.sums[warp] = squares;
    sync_threads();
    float mean = s.sums[0];
#pragma unroll
    for (int w = 1; w < 8; w++) mean = add_rn(mean, s.sums[w]);
    float factor = div_rn(1.0f, sqrt_rn(mean / static_cast<float>(p.dim) + p.norm_eps));
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + tid) * 8;
      if (g * 2048 >= p.dim) break;
      uint4 a = weight[g][0], b = weight[g][1], c = s.held[g][0][tid];
      uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, x[4] = {c.x, c.y, c.z, c.w}, out[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        out[i] = packed(low(x[i]) * factor * bits_float(w[2 * i]), high(x[i]) * factor * bits_float(w[2 * i + 1]));
      if (channel < p.dim) *reinterpret_cast<uint4*>(p.x + channel) = {out[0], out[1], out[2], out[3]};
      write_codes(p, 0, channel, out);
    }
    forget(p);
    if (warp == 0 && lane < MAX_OUTS) {
      if (lane >= 2 * MULT) p.next_mix[lane - 2 * MULT] = fma_rn(logit, s.scale[2], s.base[lane]);
      else if (lane >= MULT) p.next_post[lane - MULT] = 2.0f * gate;
    }
  }
};

template <typename Part>
DEVICE void run_told(Part part) {
  part.load();
  sync_threads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  part.run();
}

DEVICE void balance_logits(const StreamsArgs& p, float* to) {
  float m[MULT * MULT];
#pragma unroll
  for (int i = 0; i < MULT * MULT; i++) m[i] = load_fresh(p.mix + i);
  balance(m, p.hc_eps, p.iters);
#pragma unroll
  for (int i = 0; i < MULT * MULT; i++) to[i] = m[i];
}

template <bool MIXED>
DEVICE void run_tell(const StreamsArgs& p) {
  TellShared& s = *reinterpret_cast<TellShared*>(dynamic_shared());
  int multiply = p.dim / BLOCK * (MAX_OUTS / 8), tid = threadIdx.x;
  if (tid >= 32 && tid < 32 + MULT) s.post[tid - 32] = load_fresh(p.post + tid - 32);
  if (p.takes_logits && tid == 0) balance_logits(p, s.mix);
  if (!p.takes_logits && tid < MULT * MULT) s.mix[tid] = load_fresh(p.mix + tid);
  int part = part_of_cta(multiply);
  if (part < multiply)
    run_told(Multiplies<MIXED>{p, s, part});
  else
    run_told(Finishes<MIXED>{p, s});
}
