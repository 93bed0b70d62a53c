// Few rows that something joins. Their parts are told to the CTAs that wait for them, one a row: a sum and its
// mark in one word, so that nothing is fenced or counted. Grid: those CTAs and the ones of run_step, which have all
// rows. The matrices are left as their logits; the next launch balances them ahead of its wait. Streams, gates and
// matrices are older than the kernel ahead, so all but y is here when that ends, if there is room beside its CTAs:
// hence 64 registers, as the products of few rows leave.
#pragma once
#include "hyper_streams.cuh"

constexpr int TELL_THREADS = 256;
constexpr int TELL_ROWS = 8;  // at most
struct TellShared {
  union {
    uint4 held[MAX_GROUPS][MULT][TELL_THREADS];  // who finishes: a thread's channels of the streams
    struct {                                     // who multiplies
      uint4 fn[MULT][TELL_THREADS];
      uint2 mixed[TELL_ROWS][MULT][32];
    };
  };
  float gathered[8][PARTS];
  Shares shares[8];  // who finishes: for each warp
  float mix[TELL_ROWS * MULT * MULT], post[TELL_ROWS * MULT];  // who finishes has its row's alone
  float sums[8], base[PARTS], scale[4];                        // the last two of the site
};

#ifdef MOET_EMULATE
DEVICE int part_of_cta(int, int) { return blockIdx.x; }
DEVICE void want(const void*) {}
DEVICE void tell(uint64_t* to, float sum) { *to = uint64_t(1) << 32 | float_bits(sum); }
DEVICE uint64_t ask(const uint64_t* from) {
  if (*from >> 32 == 0) emulation::pause(emulation::SPIN);
  return *from;
}
#else
// Who waits starts first and has most to prepare.
DEVICE int part_of_cta(int multiply, int rows) {
  int cta = blockIdx.x;
  return cta < rows ? multiply + cta : cta - rows;
}
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

// A row's sums over all blocks as gather_parts makes them, once all are told. Who tells waits for nobody, so all
// are in the end; giving up would be a wrong sum.
DEVICE float gather_told(const StreamsArgs& p, int row, float (*gathered)[PARTS]) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  const uint64_t* told = p.told + row * blocks * PARTS;
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
      if (mine && block < blocks) found[i] = ask(told + block * PARTS + lane);
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
DEVICE void forget(const StreamsArgs& p, int row) {
  int words = p.dim / BLOCK * PARTS;
  for (int i = threadIdx.x; i < words; i += TELL_THREADS) p.told[row * words + i] = 0;
}

// One of run_step's CTAs: a warp has some streams of a row to mix, then a row of fn.
template <bool MIXED>
struct Multiplies {
  const StreamsArgs& p;
  TellShared& s;
  int part, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  int block = part % blocks, out = part / blocks * 8 + warp;
  int channel = block * BLOCK + lane * 4;
  int streams = p.rows > 4 ? 4 : p.rows > 2 ? 2 : 1;  // that a warp mixes
  int row = warp * streams / MULT;
  uint2 old[MULT];

  DEVICE void load() {
#pragma unroll
    for (int k = 0; k < MULT; k++)
      s.fn[k][threadIdx.x] = *reinterpret_cast<const uint4*>(p.fn + (uint64_t(out) * MULT + k) * p.dim + channel);
    if (row >= p.rows) return;
#pragma unroll
    for (int k = 0; k < MULT; k++) old[k] = load_pairs(p.streams + (row * MULT + k) * p.dim + channel);
  }
  DEVICE void run() {
    if (row < p.rows) {
      uint2 y;
      if constexpr (MIXED)
        y = sum_of_parts(p, row, channel);
      else
        y = load_pairs(p.y + row * p.dim + channel);
#pragma unroll 1
      for (int k = warp * streams % MULT, end = k + streams; k < end; k++)
        s.mixed[row][k][lane] = mix_four(old, y, s.post[row * MULT + k], s.mix + row * MULT * MULT + k);
    }
    sync_threads();
    uint64_t* to = p.told + block * PARTS;
#pragma unroll 1
    for (int r = 0; r < p.rows; r++, to += blocks * PARTS) {
      float sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        Four v = unpack_four(s.mixed[r][k][lane]);
        uint4 fn = s.fn[k][threadIdx.x];
        uint32_t w[4] = {fn.x, fn.y, fn.z, fn.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          sum = fma_rn(bits_float(w[i]), v.v[i], sum);
          square = fma_rn(v.v[i], v.v[i], square);
        }
      }
      sum = warp_sum(sum), square = warp_sum(square);
      if (lane == 0) {
        tell(to + out, sum);
        if (out == 0) tell(to + PARTS - 1, square);
      }
    }
  }
};

// A CTA that is told.
template <bool MIXED>
struct Finishes {
  const StreamsArgs& p;
  TellShared& s;
  int row, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;

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
        s.held[g][k][tid] = load_fresh(reinterpret_cast<const uint4*>(p.streams + (row * MULT + k) * p.dim + channel));
    }
  }
  static DEVICE void load_halves(const uint16_t* from, bool there, uint2& a, uint2& b) {
    uint4 u = {0, 0, 0, 0};
    if (there) u = load_fresh(reinterpret_cast<const uint4*>(from));
    a = {u.x, u.y}, b = {u.z, u.w};
  }
  // Eight channels from their parts, all of which are asked for at once. By whole warps.
  DEVICE void add_joining(int channel, uint2* y) {
    bool there = channel < p.dim;
    Parts a, b;
    int choice = row * p.top_k;
    uint32_t none = load_fresh(reinterpret_cast<const uint32_t*>(p.expert_ids + choice) + 1) >> 31;
    float weight = p.part_weights && lane < p.top_k ? load_fresh(p.part_weights + choice + lane) : 1.0f;
    load_halves(p.shared + row * p.dim + channel, there, a.shared, b.shared);
    const uint16_t* from = p.parts + choice * p.dim + channel;
#pragma unroll
    for (int k = 0; k < MAX_PARTS; k++, from += p.dim) load_halves(from, there && k < p.top_k, a.part[k], b.part[k]);
    Shares& shares = s.shares[warp];
    if (channel == tid * 8) {  // the first time
      if (lane < MAX_PARTS) shares.weight[lane] = weight;
      if (lane == 0) shares.choices = none ? 0 : p.top_k;
    }
    sync_warp();
    y[0] = add_parts(a, shares), y[1] = add_parts(b, shares);
  }
  DEVICE void mix() {
    uint2 ahead[2] = {};  // of y, if it is whole
    if (!MIXED) load_halves(p.y + row * p.dim + tid * 8, tid * 8 < p.dim, ahead[0], ahead[1]);
#pragma unroll 1
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + tid) * 8, next = channel + 2048;
      uint2 y[2] = {ahead[0], ahead[1]};
      if (MIXED) add_joining(channel, y);
      if (channel >= p.dim) continue;
      if (!MIXED) load_halves(p.y + row * p.dim + next, next < p.dim, ahead[0], ahead[1]);
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        uint2 joining = i ? y[1] : y[0], old[MULT];
#pragma unroll
        for (int k = 0; k < MULT; k++) old[k] = half_of(&s.held[g][k][tid])[i];
#pragma unroll
        for (int k = 0; k < MULT; k++) {
          uint2 stream = mix_four(old, joining, s.post[k], s.mix + k);
          half_of(&s.held[g][k][tid])[i] = stream;
          *reinterpret_cast<uint2*>(p.mixed + (row * MULT + k) * p.dim + channel + 4 * i) = stream;
        }
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
    float logit = mixing_logit(p, gather_told(p, row, s.gathered));
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
      if (channel < p.dim) *reinterpret_cast<uint4*>(p.x + row * p.dim + channel) = {out[0], out[1], out[2], out[3]};
      write_codes(p, row, channel, out);
    }
    forget(p, row);
    if (tid < MAX_OUTS) {
      if (tid >= 2 * MULT) p.next_mix[row * MULT * MULT + tid - 2 * MULT] = fma_rn(logit, s.scale[2], s.base[tid]);
      else if (tid >= MULT) p.next_post[row * MULT + tid - MULT] = 2.0f * gate;
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

// Of one row, from logits in memory to a matrix.
DEVICE void balance_logits(const StreamsArgs& p, int row, float* to) {
  float m[MULT * MULT];
#pragma unroll
  for (int i = 0; i < MULT * MULT; i++) m[i] = load_fresh(p.mix + row * MULT * MULT + i);
  balance(m, p.hc_eps, p.iters);
#pragma unroll
  for (int i = 0; i < MULT * MULT; i++) to[i] = m[i];
}

template <bool MIXED>
DEVICE void run_tell(const StreamsArgs& p) {
  TellShared& s = *reinterpret_cast<TellShared*>(dynamic_shared());
  int multiply = p.dim / BLOCK * (MAX_OUTS / 8), part = part_of_cta(multiply, p.rows), tid = threadIdx.x;
  bool finishes = part >= multiply;
  int first = finishes ? part - multiply : 0, rows = finishes ? 1 : p.rows;
  int other = tid - 128;  // of a warp that has no row to balance if they are few
  if (other >= 0 && other < rows * MULT) s.post[other] = load_fresh(p.post + first * MULT + other);
  if (!p.takes_logits) {
    if (tid < rows * MULT * MULT) s.mix[tid] = load_fresh(p.mix + first * MULT * MULT + tid);
  } else if (tid % 32 == 0 && tid / 32 < rows) {
    balance_logits(p, first + tid / 32, s.mix + tid / 32 * MULT * MULT);
  }
  if (finishes)
    run_told(Finishes<MIXED>{p, s, first});
  else
    run_told(Multiplies<MIXED>{p, s, part});
}
