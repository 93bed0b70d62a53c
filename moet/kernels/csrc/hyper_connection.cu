// From one sublayer's output to the next one's input: streams mixed, gates projected, streams
// collapsed, normed and rounded to e4m3. Four streams. See hyper_connection.py and device_streams.py.
//
// A block is 128 channels of all streams. A row's product with fn is summed within a block by one
// lane order and tree, over the blocks in ascending order, whichever kernel does it: a row's bits do
// not depend on how many rows there are.
#include "cluster.cuh"
#include "codec.cuh"
#include "grid_sync.cuh"

constexpr int MULT = 4, BLOCK = 128;
constexpr int STEP_THREADS = 288;   // eight warps for channels, one for the mixing matrix
constexpr int TILE_THREADS = 256;
constexpr int PARTS = 32;           // fn rows of a block's sums; the last is the sum of squares
constexpr int MAX_GROUPS = 2;       // of 8 channels, of a thread: dim <= 4096
constexpr int TILE = MOET_SM == 90 ? 4 : 3;  // rows of a warp at once, as registers allow
constexpr int MAX_OUTS = MULT * (2 + MULT);
constexpr int MAX_PARTS = 8;        // of a row's y

struct StreamsArgs {
  const uint16_t* y;        // [rows, dim] bf16; null: the streams stay
  const uint16_t* streams;  // [rows, 4, dim] bf16
  const float* post;        // [rows, 4]
  const float* mix;         // [rows, 4, 4]
  const float* fn;          // [outs, 4 * dim]
  const float* base;        // [outs]
  const float* scale;       // [3]; a head: [1]
  const float* weight;      // [dim]
  uint16_t* mixed;          // [rows, 4, dim]; the streams if they stay
  float* partial;           // [rows, blocks, PARTS]
  uint32_t* counters;       // [grid y], zero between launches; null: sums only
  uint16_t* x;              // [rows, dim] bf16
  uint8_t* codes;           // [rows, dim] e4m3 in MMA order; or null
  float* code_scale;        // [rows, dim / 128]
  float* next_post;         // [rows, 4]; null: a head, which has no gates but the first
  float* next_mix;          // [rows, 4, 4]
  float norm_eps, hc_eps;
  int rows, rows_each, dim, outs, iters;
  // Of kernels that are mixed: y is the sum of a row's parts, weighed, in their order, and of `shared`, rounded
  // once, as combine_experts of moe.cu makes it.
  const uint16_t* parts;      // [rows * top_k, dim]
  const float* part_weights;  // [rows * top_k], or null
  const uint16_t* shared;     // [rows, dim]
  const int64_t* expert_ids;  // [rows, top_k]; a first one below 0: the row has no parts
  int top_k;                  // at most MAX_PARTS
  // Of kernels that tell.
  uint64_t* told;  // [2, blocks, PARTS], zero between launches: a sum and, in the upper half, 1
  int rehearses;      // 1: everything is run through once before the kernel ahead has ended
  int takes_logits;   // 1: mix is not balanced yet
  int leaves_logits;  // 1: nor is next_mix to be
};

DEVICE float low(uint32_t pair) { return bits_float(pair << 16); }
DEVICE float high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }
DEVICE uint32_t packed(float lo, float hi) { return to_bf16(lo) | static_cast<uint32_t>(to_bf16(hi)) << 16; }
DEVICE float sigmoid(float v) { return div_rn(1.0f, 1.0f + exp_precise(-v)); }

#ifdef MOET_EMULATE
DEVICE float reciprocal(float v) { return div_approx(1.0f, v); }
DEVICE uint2 load_fresh(const uint2* p) { return *p; }
template <typename T>
DEVICE void store_if(bool real, T* to, T v) {
  if (real) *to = v;
}
template <typename T>
DEVICE void store_shared_if(bool real, T* to, T v) {
  store_if(real, to, v);
}
DEVICE int thread_anew() { return threadIdx.x; }
DEVICE void want(const void*) {}
#else
// Brings a line as near as memory that all share.
DEVICE void want(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Keeps what follows from it out of registers between two passes.
DEVICE int thread_anew() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
DEVICE uint2 load_fresh(const uint2* p) { return __ldcg(p); }
// Without a branch, past which a rehearsal would not see the instructions that make the value.
#define STORE_IF(how, address, ...)                                                                        \
  asm volatile("{\n.reg .pred real;\nsetp.ne.u32 real, %0, 0;\n@real st." how ";\n}" ::"r"(uint32_t(real)), \
               address, __VA_ARGS__                                                                        \
               : "memory")
DEVICE void store_if(bool real, uint32_t* to, uint32_t v) { STORE_IF("global.u32 [%1], %2", "l"(to), "r"(v)); }
DEVICE void store_if(bool real, uint2* to, uint2 v) {
  STORE_IF("global.v2.u32 [%1], {%2, %3}", "l"(to), "r"(v.x), "r"(v.y));
}
DEVICE void store_if(bool real, uint4* to, uint4 v) {
  STORE_IF("global.v4.u32 [%1], {%2, %3, %4, %5}", "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
DEVICE void store_shared_if(bool real, uint2* to, uint2 v) {
  STORE_IF("shared.v2.u32 [%1], {%2, %3}", "r"(shared_address(to)), "r"(v.x), "r"(v.y));
}
DEVICE void store_shared_if(bool real, uint4* to, uint4 v) {
  STORE_IF("shared.v4.u32 [%1], {%2, %3, %4, %5}", "r"(shared_address(to)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
// div_approx(1, v) bit for bit for v from 2^-126 to 2^126, which it need not look at.
DEVICE float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
#endif

// What a thread reads of a site when it finishes a row. HELD: already here.
template <bool HELD>
struct SiteValues {
  float base, scale[3];
  uint4 weight[MAX_GROUPS][2];
};
template <>
struct SiteValues<false> {};

DEVICE SiteValues<true> load_site(const StreamsArgs& p) {
  SiteValues<true> s = {};
  int lane = threadIdx.x & 31;
  if (lane < p.outs) s.base = p.base[lane];
  s.scale[0] = p.scale[0];
  if (p.next_post) s.scale[1] = p.scale[1], s.scale[2] = p.scale[2];
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    int channel = (g * 256 + threadIdx.x) * 8;
    if (threadIdx.x >= 256 || channel >= p.dim) continue;
    const uint4* weight = reinterpret_cast<const uint4*>(p.weight + channel);
    s.weight[g][0] = weight[0], s.weight[g][1] = weight[1];
  }
  return s;
}

// Four channels of a row.
struct Four {
  float v[4];
};
DEVICE Four load_four(const uint16_t* p) {
  uint2 u = *reinterpret_cast<const uint2*>(p);
  return {{low(u.x), high(u.x), low(u.y), high(u.y)}};
}
DEVICE Four unpack_four(uint2 u) { return {{low(u.x), high(u.x), low(u.y), high(u.y)}}; }

// A stream of a row from the old ones, rounded. column: its own of the mixing matrix.
DEVICE uint2 mix_four(const uint2* old, uint2 y, float gate, const float* column) {
  Four sum = unpack_four(y);
#pragma unroll
  for (int i = 0; i < 4; i++) sum.v[i] *= gate;
#pragma unroll
  for (int j = 0; j < MULT; j++) {
    Four stream = unpack_four(old[j]);
    float m = column[j * MULT];
#pragma unroll
    for (int i = 0; i < 4; i++) sum.v[i] = fma_rn(stream.v[i], m, sum.v[i]);
  }
  return {packed(sum.v[0], sum.v[1]), packed(sum.v[2], sum.v[3])};
}

// Four channels, which a kernel that tells reads before they are final, too.
template <bool FRESH>
DEVICE uint2 load_pairs(const uint16_t* p) {
  const uint2* from = reinterpret_cast<const uint2*>(p);
  return FRESH ? load_fresh(from) : *from;
}

// Four channels of y before they are one.
struct Parts {
  uint2 part[MAX_PARTS], shared;
};
struct Shares {
  float weight[MAX_PARTS];
  int choices;
};
DEVICE uint2 add_parts(const Parts& parts, const Shares& s) {
  Four sum = {};
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    if (k >= s.choices) continue;
    Four v = unpack_four(parts.part[k]);
#pragma unroll
    for (int i = 0; i < 4; i++) sum.v[i] = k ? add_rn(sum.v[i], v.v[i] * s.weight[k]) : v.v[i] * s.weight[k];
  }
  Four v = unpack_four(parts.shared);
#pragma unroll
  for (int i = 0; i < 4; i++) sum.v[i] = add_rn(sum.v[i], v.v[i]);
  return {packed(sum.v[0], sum.v[1]), packed(sum.v[2], sum.v[3])};
}

// Four channels of y from its parts. All of them are read before any is added.
template <bool FRESH = false>
DEVICE uint2 sum_of_parts(const StreamsArgs& p, int row, int channel) {
  Shares s;
  Parts parts;
  int first = row * p.top_k;
  s.choices = load_fresh(reinterpret_cast<const uint32_t*>(p.expert_ids + first) + 1) >> 31 ? 0 : p.top_k;
  parts.shared = load_pairs<FRESH>(p.shared + uint64_t(row) * p.dim + channel);
#pragma unroll
  for (int k = 0; k < MAX_PARTS; k++) {
    parts.part[k] = {0, 0}, s.weight[k] = 1.0f;
    if (k >= p.top_k) continue;
    parts.part[k] = load_pairs<FRESH>(p.parts + uint64_t(first + k) * p.dim + channel);
    if (p.part_weights) s.weight[k] = FRESH ? load_fresh(p.part_weights + first + k) : p.part_weights[first + k];
  }
  return add_parts(parts, s);
}

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step; step /= 2) v = add_rn(v, shuffle_xor(v, step));
  return v;
}

// A row's sums over its blocks; every warp of `warps` 0..7 calls, each lane gets its own part.
DEVICE float gather_parts(const StreamsArgs& p, int row, float* shared) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  if (warp < 8) {
    float sum = 0.0f;
    for (int b = warp; b < blocks; b += 8)
      sum = add_rn(sum, load_fresh(p.partial + (uint64_t(row) * blocks + b) * PARTS + lane));
    shared[warp * PARTS + lane] = sum;
  }
  sync_threads();
  float total = shared[lane];
#pragma unroll
  for (int w = 1; w < 8; w++) total = add_rn(total, shared[w * PARTS + lane]);
  return total;
}

// Row softmax, then columns and rows in turn; ends on columns. In one thread's registers.
DEVICE void balance(float* m, float eps, int iters) {
#pragma unroll
  for (int r = 0; r < MULT; r++) {
    float* row = m + r * MULT;
    float top = larger(larger(row[0], row[1]), larger(row[2], row[3]));
#pragma unroll
    for (int i = 0; i < MULT; i++) row[i] = exp_precise(row[i] - top);
    float factor = div_rn(1.0f, (row[0] + row[1]) + (row[2] + row[3]));
#pragma unroll
    for (int i = 0; i < MULT; i++) row[i] = fma_rn(row[i], factor, eps);
  }
#pragma unroll 1
  for (int n = 0; n < iters; n++) {
    if (n) {
#pragma unroll
      for (int r = 0; r < MULT; r++) {
        float* row = m + r * MULT;
        float factor = reciprocal(((row[0] + row[1]) + (row[2] + row[3])) + eps);
#pragma unroll
        for (int i = 0; i < MULT; i++) row[i] *= factor;
      }
    }
#pragma unroll
    for (int i = 0; i < MULT; i++) {
      float factor = reciprocal(((m[i] + m[4 + i]) + (m[8 + i] + m[12 + i])) + eps);
#pragma unroll
      for (int r = 0; r < MULT; r++) m[r * MULT + i] *= factor;
    }
  }
}

// The ninth warp: gates of the sublayer's output, and the matrix that mixes the streams after it.
DEVICE void write_gates(const StreamsArgs& p, int row, float logit, float base, float post_scale, float mix_scale,
                        bool real = true) {
  int lane = threadIdx.x & 31;
  if (lane >= MULT && lane < 2 * MULT && real)
    p.next_post[uint64_t(row) * MULT + lane - MULT] = 2.0f * sigmoid(fma_rn(logit, post_scale, base));
  float cell = 0.0f;
  if (lane >= 2 * MULT && lane < MAX_OUTS) cell = fma_rn(logit, mix_scale, base);
  float m[MULT * MULT];
#pragma unroll
  for (int i = 0; i < MULT * MULT; i++) m[i] = bits_float(shuffle(float_bits(cell), 2 * MULT + i));
  if (lane == 0) {
    balance(m, p.hc_eps, real ? p.iters : 2);
    float* to = p.next_mix + uint64_t(row) * MULT * MULT;
    if (!real) return;
#pragma unroll
    for (int i = 0; i < MULT * MULT; i++) to[i] = m[i];
  }
}

// Eight channels as e4m3, even words of a group before odd ones, with a scale over sixteen threads' channels.
struct Codes {
  uint32_t words[2];
  float scale;
};
DEVICE Codes codes_of(const uint32_t* pairs) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    amax = larger(amax, bits_float(float_bits(low(pairs[i])) & 0x7FFFFFFFu));
    amax = larger(amax, bits_float(float_bits(high(pairs[i])) & 0x7FFFFFFFu));
  }
#pragma unroll
  for (int step = 8; step; step /= 2) amax = larger(amax, shuffle_xor(amax, step));
  int e = activation_exponent(amax);
  float inverse = power_of_two(-e);
  Codes c;
#pragma unroll
  for (int i = 0; i < 2; i++)
    c.words[i] = to_e4m3x2(low(pairs[2 * i]) * inverse, high(pairs[2 * i]) * inverse) |
                 to_e4m3x2(low(pairs[2 * i + 1]) * inverse, high(pairs[2 * i + 1]) * inverse) << 16;
  c.scale = power_of_two(e);
  return c;
}
// Where the first of them goes, see layout.to_mma_order: the even words of 32 columns, then the odd ones.
DEVICE uint32_t* place_of_codes(const StreamsArgs& p, int row, int channel) {
  return reinterpret_cast<uint32_t*>(p.codes + uint64_t(row) * p.dim + (channel & ~31) + ((channel >> 3) & 3) * 4);
}
DEVICE void write_codes(const StreamsArgs& p, int row, int channel, const uint32_t* pairs) {
  Codes c = codes_of(pairs);
  if (channel >= p.dim) return;
  uint32_t* to = place_of_codes(p, row, channel);
  to[0] = c.words[0], to[4] = c.words[1];
  if ((channel & 127) == 0) p.code_scale[uint64_t(row) * (p.dim / BLOCK) + channel / BLOCK] = c.scale;
}

// One row from its parts to its outputs, by all threads of a CTA.
template <bool HELD>
DEVICE void finish_row(const StreamsArgs& p, int row, float* shared, const SiteValues<HELD>& site) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint4 raw[MAX_GROUPS][MULT];
  if (warp < 8) {
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + threadIdx.x) * 8;
      if (channel < p.dim) {
#pragma unroll
        for (int k = 0; k < MULT; k++)
          raw[g][k] = load_fresh(reinterpret_cast<const uint4*>(p.mixed + (uint64_t(row) * MULT + k) * p.dim + channel));
      }
    }
  }
  float total = gather_parts(p, row, shared);
  float square = bits_float(shuffle(float_bits(total), PARTS - 1));
  float logit = total * div_rn(1.0f, sqrt_rn(square / static_cast<float>(MULT * p.dim) + p.norm_eps));
  float base, scale[3];
  if constexpr (HELD) {
    base = site.base, scale[0] = site.scale[0], scale[1] = site.scale[1], scale[2] = site.scale[2];
  } else {
    base = lane < p.outs ? p.base[lane] : 0.0f;
    scale[0] = p.scale[0];
    if (p.next_post) scale[1] = p.scale[1], scale[2] = p.scale[2];
  }
  if (warp == 8) {
    if (p.next_post) write_gates(p, row, logit, base, scale[1], scale[2]);
    return;
  }
  float gate = lane < MULT ? sigmoid(fma_rn(logit, scale[0], base)) + p.hc_eps : 0.0f;
  float pre[MULT];
#pragma unroll
  for (int k = 0; k < MULT; k++) pre[k] = bits_float(shuffle(float_bits(gate), k));
  uint32_t x[MAX_GROUPS][4];
  float squares = 0.0f;
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    if ((g * 256 + threadIdx.x) * 8 < p.dim) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lo = 0.0f, hi = 0.0f;
#pragma unroll
        for (int k = 0; k < MULT; k++) {
          uint32_t pair = i == 0 ? raw[g][k].x : i == 1 ? raw[g][k].y : i == 2 ? raw[g][k].z : raw[g][k].w;
          lo = fma_rn(low(pair), pre[k], lo);
          hi = fma_rn(high(pair), pre[k], hi);
        }
        x[g][i] = packed(lo, hi);
        squares = fma_rn(low(x[g][i]), low(x[g][i]), squares);
        squares = fma_rn(high(x[g][i]), high(x[g][i]), squares);
      }
    }
  }
  squares = warp_sum(squares);
  float* sums = shared + 8 * PARTS;
  if (lane == 0) sums[warp] = squares;
  sync_named<256>(1);
  float mean = sums[0];
#pragma unroll
  for (int w = 1; w < 8; w++) mean = add_rn(mean, sums[w]);
  float factor = div_rn(1.0f, sqrt_rn(mean / static_cast<float>(p.dim) + p.norm_eps));
#pragma unroll
  for (int g = 0; g < MAX_GROUPS; g++) {
    int channel = (g * 256 + threadIdx.x) * 8;
    if (g * 2048 >= p.dim) break;
    uint32_t out[4] = {0, 0, 0, 0};
    if (channel < p.dim) {
      uint4 a, b;
      if constexpr (HELD) {
        a = site.weight[g][0], b = site.weight[g][1];
      } else {
        const uint4* weight = reinterpret_cast<const uint4*>(p.weight + channel);
        a = weight[0], b = weight[1];
      }
      uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
        out[i] = packed(low(x[g][i]) * factor * bits_float(w[2 * i]), high(x[g][i]) * factor * bits_float(w[2 * i + 1]));
      *reinterpret_cast<uint4*>(p.x + uint64_t(row) * p.dim + channel) = {out[0], out[1], out[2], out[3]};
    }
    if (p.codes) write_codes(p, row, channel, out);
  }
}

// Few rows. Grid: blocks times groups of eight fn rows, then groups of rows_each rows. A warp has one
// row of fn in registers. The CTA that is last of its rows finishes them. HELD: what finishing reads of
// the site is read at once. MIXED: y is summed from a mixture's parts.
template <bool HELD, bool MIXED>
DEVICE void run_step(const StreamsArgs& p) {
  float* shared = reinterpret_cast<float*>(dynamic_shared());
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK;
  int block = static_cast<int>(blockIdx.x) % blocks, group = static_cast<int>(blockIdx.x) / blocks;
  int out = group * 8 + warp, channel = block * BLOCK + lane * 4;
  int first = blockIdx.y * p.rows_each, last = first + p.rows_each < p.rows ? first + p.rows_each : p.rows;
  bool multiplies = warp < 8 && out < p.outs, leads = group == 0 && warp == 0, passes = MIXED || p.y;
  uint4 fn[MULT];
#pragma unroll
  for (int k = 0; k < MULT; k++)
    if (multiplies) fn[k] = *reinterpret_cast<const uint4*>(p.fn + (uint64_t(out) * MULT + k) * p.dim + channel);
  SiteValues<HELD> site;
  if constexpr (HELD) site = load_site(p);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (multiplies) {
    for (int row = first; row < last; row++) {
      const uint16_t* streams = p.streams + uint64_t(row) * MULT * p.dim + channel;
      uint2 old[MULT], y = {0, 0};
      float post[MULT] = {}, mix[MULT * MULT] = {};
#pragma unroll
      for (int k = 0; k < MULT; k++) old[k] = *reinterpret_cast<const uint2*>(streams + k * p.dim);
      if (passes) {
        if constexpr (MIXED)
          y = sum_of_parts(p, row, channel);
        else
          y = *reinterpret_cast<const uint2*>(p.y + uint64_t(row) * p.dim + channel);
#pragma unroll
        for (int k = 0; k < MULT; k++) post[k] = p.post[uint64_t(row) * MULT + k];
#pragma unroll
        for (int k = 0; k < MULT * MULT; k++) mix[k] = p.mix[uint64_t(row) * MULT * MULT + k];
      }
      float sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        uint2 stream = passes ? mix_four(old, y, post[k], mix + k) : old[k];
        if (leads && passes)
          *reinterpret_cast<uint2*>(p.mixed + (uint64_t(row) * MULT + k) * p.dim + channel) = stream;
        Four v = unpack_four(stream);
        uint32_t w[4] = {fn[k].x, fn[k].y, fn[k].z, fn[k].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          sum = fma_rn(bits_float(w[i]), v.v[i], sum);
          square = fma_rn(v.v[i], v.v[i], square);
        }
      }
      float* parts = p.partial + (uint64_t(row) * blocks + block) * PARTS;
      sum = warp_sum(sum);
      if (lane == 0) parts[out] = sum;
      if (leads) {
        square = warp_sum(square);
        if (lane == 0) parts[PARTS - 1] = square;
      }
    }
  }
  if (!p.counters) return;
  uint32_t* arrived = reinterpret_cast<uint32_t*>(shared + 9 * PARTS);
  sync_threads();
  if (threadIdx.x == 0) {
    if constexpr (!HELD) fence_device();
    *arrived = add_ordered(p.counters + blockIdx.y, 1);
  }
  sync_threads();
  if (*arrived != gridDim.x - 1) return;
  if (threadIdx.x == 0) p.counters[blockIdx.y] = 0;
  for (int row = first; row < last; row++) {
    finish_row(p, row, shared, site);
    sync_threads();
  }
}
KERNEL(STEP_THREADS, 2) streams_step(GRID_CONSTANT StreamsArgs p) { run_step<false, false>(p); }
LAUNCHABLE(streams_step, StreamsArgs, STEP_THREADS)
KERNEL(STEP_THREADS, 1) streams_step_held(GRID_CONSTANT StreamsArgs p) { run_step<true, false>(p); }
LAUNCHABLE(streams_step_held, StreamsArgs, STEP_THREADS)
KERNEL(STEP_THREADS, 2) streams_step_mixed(GRID_CONSTANT StreamsArgs p) { run_step<false, true>(p); }
LAUNCHABLE(streams_step_mixed, StreamsArgs, STEP_THREADS)
KERNEL(STEP_THREADS, 1) streams_step_held_mixed(GRID_CONSTANT StreamsArgs p) { run_step<true, true>(p); }
LAUNCHABLE(streams_step_held_mixed, StreamsArgs, STEP_THREADS)

// One row, whose parts are told to the CTAs that wait for them: a sum and its mark in one word, so that nothing
// is fenced or counted. Grid: run_step's CTAs, one that finishes the row, one that makes its gates, unless the
// matrix is left as its logits: then the first makes the gates, and the next launch balances ahead of its wait.
// Streams, gates and matrix are older than the kernel ahead, so all but y is here when that ends.
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
DEVICE void tell(uint64_t* to, float sum) { *to = uint64_t(1) << 32 | float_bits(sum); }
DEVICE uint64_t ask(const uint64_t* from) {
  if (*from >> 32 == 0) emulation::pause(emulation::SPIN);
  return *from;
}
#else
// Who waits starts first and has most to prepare.
DEVICE int part_of_cta(int multiply) {
  int from_multiply = multiply + blockIdx.x;
  return from_multiply < gridDim.x ? from_multiply : from_multiply - gridDim.x;
}
DEVICE void tell(uint64_t* to, float sum) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t(1) << 32 | float_bits(sum)) : "memory");
}
DEVICE uint64_t ask(const uint64_t* from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
#endif

// As gather_parts, once all are told. Not real: whatever is there.
DEVICE float gather_told(const StreamsArgs& p, const uint64_t* told, float (*gathered)[PARTS], int tid, bool real) {
  int warp = tid >> 5, lane = tid & 31, blocks = p.dim / BLOCK;
  bool mine = lane < MAX_OUTS || lane == PARTS - 1;
  uint64_t found[4];
  uint32_t marks;
#pragma unroll 1
  for (int asked = 0; asked < 1 << 20; asked++) {
    marks = 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int block = i * 8 + warp;
      found[i] = uint64_t(1) << 32;
      if (mine && block < blocks) found[i] = ask(told + block * PARTS + lane);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) marks &= static_cast<uint32_t>(found[i] >> 32);
    if (marks || !real) break;
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
DEVICE void forget(const StreamsArgs& p, uint64_t* told, int tid) {
  for (int i = tid; i < p.dim / BLOCK * PARTS; i += TELL_THREADS) told[i] = 0;
}

DEVICE float mixing_logit(const StreamsArgs& p, float total) {
  float square = bits_float(shuffle(float_bits(total), PARTS - 1));
  return total * div_rn(1.0f, sqrt_rn(square / static_cast<float>(MULT * p.dim) + p.norm_eps));
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
  DEVICE void run(bool real) {
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
    uint64_t* to = p.told + (uint64_t(lane & 1) * blocks + block) * PARTS;  // a lane for each who waits
    if (real && lane < (p.leaves_logits ? 1 : 2)) {
      tell(to + out, sum);
      if (out == 0) tell(to + PARTS - 1, square);
    }
    sync_threads();
  }
};

template <bool MIXED>
struct Finishes {
  const StreamsArgs& p;
  TellShared& s;

  static DEVICE uint2* half_of(uint4* p) { return reinterpret_cast<uint2*>(p); }
  DEVICE void load() {
    int tid = threadIdx.x;
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
  DEVICE void load_joining(int tid, uint2* y) {
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
  DEVICE void mix(int tid, bool real) {
    uint2 y[2 * MAX_GROUPS] = {};
    load_joining(tid, y);
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
        store_shared_if(real, half_of(&s.held[i / 2][k][tid]) + i % 2, stream);
        store_if(real, reinterpret_cast<uint2*>(p.mixed + k * p.dim + channel), stream);
      }
    }
  }
  DEVICE void run(bool real) {
    int tid = thread_anew(), warp = tid >> 5, lane = tid & 31;
    mix(tid, real);
    uint4 weight[MAX_GROUPS][2] = {};
#pragma unroll
    for (int g = 0; g < MAX_GROUPS; g++) {
      int channel = (g * 256 + tid) * 8;
      const uint4* from = reinterpret_cast<const uint4*>(p.weight + channel);
      if (channel < p.dim) weight[g][0] = from[0], weight[g][1] = from[1];
    }
    float logit = mixing_logit(p, gather_told(p, p.told, s.gathered, tid, real));
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
      store_shared_if(real, &s.held[g][0][tid], uint4{x[0], x[1], x[2], x[3]});
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
      bool has = real && channel < p.dim;
      uint4 a = weight[g][0], b = weight[g][1], c = s.held[g][0][tid];
      uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, x[4] = {c.x, c.y, c.z, c.w}, out[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        out[i] = packed(low(x[i]) * factor * bits_float(w[2 * i]), high(x[i]) * factor * bits_float(w[2 * i + 1]));
      store_if(has, reinterpret_cast<uint4*>(p.x + channel), uint4{out[0], out[1], out[2], out[3]});
      Codes made = codes_of(out);
      uint32_t* to = place_of_codes(p, 0, channel);
      store_if(has, to, made.words[0]), store_if(has, to + 4, made.words[1]);
      store_if(has && (tid & 15) == 0, reinterpret_cast<uint32_t*>(p.code_scale + channel / BLOCK), float_bits(made.scale));
    }
    if (real) forget(p, p.told, tid);
    if (p.leaves_logits && real && warp == 0 && lane < MAX_OUTS) {
      if (lane >= 2 * MULT) p.next_mix[lane - 2 * MULT] = fma_rn(logit, s.scale[2], s.base[lane]);
      else if (lane >= MULT) p.next_post[lane - MULT] = 2.0f * gate;
    }
    sync_threads();
  }
};

// The CTA that makes gates and the matrix.
struct Gates {
  const StreamsArgs& p;
  TellShared& s;
  float base, scale[3];

  DEVICE void load() {
    int lane = threadIdx.x & 31;
    base = lane < p.outs ? p.base[lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < 3; i++) scale[i] = p.scale[i];
  }
  DEVICE void run(bool real) {
    uint64_t* told = p.told + p.dim / BLOCK * PARTS;
    float total = gather_told(p, told, s.gathered, threadIdx.x, real);
    if (real) forget(p, told, threadIdx.x);
    if (threadIdx.x < 32) write_gates(p, 0, mixing_logit(p, total), base, scale[1], scale[2], real);
    sync_threads();
  }
};

template <typename Part>
DEVICE void run_told(const StreamsArgs& p, Part part) {
  part.load();
  sync_threads();
#pragma unroll 1
  for (int pass = p.rehearses ? 0 : 1; pass < 2; pass++) {
    if (pass) {
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    part.run(pass);
  }
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
    run_told(p, Multiplies<MIXED>{p, s, part});
  else if (part == multiply)
    run_told(p, Finishes<MIXED>{p, s});
  else
    run_told(p, Gates{p, s});
}
KERNEL(TELL_THREADS, 4) streams_tell(GRID_CONSTANT StreamsArgs p) { run_tell<false>(p); }
LAUNCHABLE(streams_tell, StreamsArgs, TELL_THREADS)
KERNEL(TELL_THREADS, 2) streams_tell_mixed(GRID_CONSTANT StreamsArgs p) { run_tell<true>(p); }
LAUNCHABLE(streams_tell_mixed, StreamsArgs, TELL_THREADS)

// A matrix that was left as its logits, for who cannot balance it.
KERNEL(32, 1) streams_balance(GRID_CONSTANT StreamsArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x == 0) balance_logits(p, p.next_mix);
}
LAUNCHABLE(streams_balance, StreamsArgs, 32)

// A row by a cluster, whose CTAs have two blocks each and read each other's sums where run_step has them in
// device memory; all sums in its order. Grid: CLUSTER_CTAS a row.
constexpr int CLUSTER_CTAS = 16, CLUSTER_DIM = 2 * CLUSTER_CTAS * BLOCK;
struct ClusterShared {
  float parts[2][PARTS];        // of each block
  float gathered[8][PARTS];
  float squares[CLUSTER_CTAS], sums[8];
  uint2 mixed[2][MULT][32];     // four channels of a lane
};
#ifdef MOET_EMULATE
#define CLUSTERS(name)                                                                                   \
  extern "C" int emulate_##name(const StreamsArgs* args, int grid_x, int, int shared_bytes) {            \
    return emulation::run_clusters(grid_x, CLUSTER_CTAS, STEP_THREADS, shared_bytes, [=] { name(*args); }); \
  }
DEVICE void arrive_in_cluster() {}
DEVICE void wait_for_cluster() { emulation::meet_cluster(); }
#else
#define CLUSTERS(name)
DEVICE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
#endif

template <bool MIXED>
DEVICE void run_cluster(const StreamsArgs& p) {
  ClusterShared& s = *reinterpret_cast<ClusterShared*>(dynamic_shared());
  int warp = shuffle(threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  int row = blockIdx.x / CLUSTER_CTAS, rank = blockIdx.x % CLUSTER_CTAS;
  bool finishes = warp == 0 && lane < 16, passes = MIXED || p.y;
  int thread = rank * 16 + (lane & 15);  // of those that finish a row in finish_row
  uint4 fn[2][3][MULT];
#pragma unroll
  for (int b = 0; b < 2; b++)
#pragma unroll
    for (int g = 0; g < 3; g++)
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        int out = g * 8 + warp;
        fn[b][g][k] = {0, 0, 0, 0};
        if (warp < 8 && out < p.outs)
          fn[b][g][k] = *reinterpret_cast<const uint4*>(p.fn + (uint64_t(out) * MULT + k) * p.dim + (b * CLUSTER_CTAS + rank) * BLOCK + lane * 4);
      }
  float base = lane < p.outs ? p.base[lane] : 0.0f, scale[3] = {p.scale[0], 0.0f, 0.0f};
  if (p.next_post) scale[1] = p.scale[1], scale[2] = p.scale[2];
  uint4 weight[2][2] = {};
  if (finishes) {
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const uint4* from = reinterpret_cast<const uint4*>(p.weight + (g * 256 + thread) * 8);
      weight[g][0] = from[0], weight[g][1] = from[1];
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp < 8) {
    uint2 old[2][MULT], y[2] = {};
    float post[MULT] = {}, mix[MULT * MULT] = {};
#pragma unroll
    for (int b = 0; b < 2; b++) {
      int channel = (b * CLUSTER_CTAS + rank) * BLOCK + lane * 4;
#pragma unroll
      for (int k = 0; k < MULT; k++)
        old[b][k] = *reinterpret_cast<const uint2*>(p.streams + (uint64_t(row) * MULT + k) * p.dim + channel);
      if constexpr (MIXED)
        y[b] = sum_of_parts(p, row, channel);
      else if (passes)
        y[b] = *reinterpret_cast<const uint2*>(p.y + uint64_t(row) * p.dim + channel);
    }
    if (passes) {
#pragma unroll
      for (int k = 0; k < MULT; k++) post[k] = p.post[uint64_t(row) * MULT + k];
#pragma unroll
      for (int k = 0; k < MULT * MULT; k++) mix[k] = p.mix[uint64_t(row) * MULT * MULT + k];
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
      int channel = (b * CLUSTER_CTAS + rank) * BLOCK + lane * 4;
      float sum[3] = {}, square = 0.0f;
#pragma unroll
      for (int k = 0; k < MULT; k++) {
        uint2 stream = passes ? mix_four(old[b], y[b], post[k], mix + k) : old[b][k];
        if (warp == 0) {
          s.mixed[b][k][lane] = stream;
          if (passes) *reinterpret_cast<uint2*>(p.mixed + (uint64_t(row) * MULT + k) * p.dim + channel) = stream;
        }
        Four v = unpack_four(stream);
#pragma unroll
        for (int i = 0; i < 4; i++) square = fma_rn(v.v[i], v.v[i], square);
#pragma unroll
        for (int g = 0; g < 3; g++) {
          uint32_t w[4] = {fn[b][g][k].x, fn[b][g][k].y, fn[b][g][k].z, fn[b][g][k].w};
#pragma unroll
          for (int i = 0; i < 4; i++) sum[g] = fma_rn(bits_float(w[i]), v.v[i], sum[g]);
        }
      }
#pragma unroll
      for (int g = 0; g < 3; g++) {
        sum[g] = warp_sum(sum[g]);
        if (lane == 0) s.parts[b][g * 8 + warp] = sum[g];
      }
      if (warp == 0) {
        square = warp_sum(square);
        if (lane == 0) s.parts[b][PARTS - 1] = square;
      }
    }
  }
  arrive_in_cluster();
  wait_for_cluster();
  if (warp < 8) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int block = i * 8 + warp;
      sum = add_rn(sum, load_of_rank(&s.parts[block / CLUSTER_CTAS][lane], block % CLUSTER_CTAS));
    }
    s.gathered[warp][lane] = sum;
  }
  sync_threads();
  float total = s.gathered[0][lane];
#pragma unroll
  for (int w = 1; w < 8; w++) total = add_rn(total, s.gathered[w][lane]);
  float square = bits_float(shuffle(float_bits(total), PARTS - 1));
  float logit = total * div_rn(1.0f, sqrt_rn(square / static_cast<float>(MULT * p.dim) + p.norm_eps));
  uint32_t x[2][4] = {};
  if (warp == 0) {
    float gate = lane < MULT ? sigmoid(fma_rn(logit, scale[0], base)) + p.hc_eps : 0.0f;
    float pre[MULT], squares = 0.0f;
#pragma unroll
    for (int k = 0; k < MULT; k++) pre[k] = bits_float(shuffle(float_bits(gate), k));
#pragma unroll
    for (int g = 0; g < 2; g++) {
      uint2 raw[MULT][2];
#pragma unroll
      for (int k = 0; k < MULT; k++) raw[k][0] = s.mixed[g][k][2 * (lane & 15)], raw[k][1] = s.mixed[g][k][2 * (lane & 15) + 1];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lo = 0.0f, hi = 0.0f;
#pragma unroll
        for (int k = 0; k < MULT; k++) {
          uint32_t pair = i == 0 ? raw[k][0].x : i == 1 ? raw[k][0].y : i == 2 ? raw[k][1].x : raw[k][1].y;
          lo = fma_rn(low(pair), pre[k], lo);
          hi = fma_rn(high(pair), pre[k], hi);
        }
        x[g][i] = packed(lo, hi);
        squares = fma_rn(low(x[g][i]), low(x[g][i]), squares);
        squares = fma_rn(high(x[g][i]), high(x[g][i]), squares);
      }
    }
    if (lane < 16) s.squares[lane] = squares;
  }
  arrive_in_cluster();
  if (warp == 8 && rank == 0 && p.next_post) write_gates(p, row, logit, base, scale[1], scale[2]);
  wait_for_cluster();
  if (warp < 8) {
    float squares = warp_sum(load_of_rank(&s.squares[lane & 15], 2 * warp + (lane >> 4)));
    if (lane == 0) s.sums[warp] = squares;
    sync_named<256>(1);
  }
  if (warp == 0) {
    float mean = s.sums[0];
#pragma unroll
    for (int w = 1; w < 8; w++) mean = add_rn(mean, s.sums[w]);
    float factor = div_rn(1.0f, sqrt_rn(mean / static_cast<float>(p.dim) + p.norm_eps));
#pragma unroll
    for (int g = 0; g < 2; g++) {
      int channel = finishes ? (g * 256 + thread) * 8 : p.dim;
      uint32_t w[8] = {weight[g][0].x, weight[g][0].y, weight[g][0].z, weight[g][0].w, weight[g][1].x, weight[g][1].y, weight[g][1].z, weight[g][1].w};
      uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        out[i] = packed(low(x[g][i]) * factor * bits_float(w[2 * i]), high(x[g][i]) * factor * bits_float(w[2 * i + 1]));
      if (finishes) *reinterpret_cast<uint4*>(p.x + uint64_t(row) * p.dim + channel) = {out[0], out[1], out[2], out[3]};
      if (p.codes) write_codes(p, row, channel, out);
    }
  }
  arrive_in_cluster();
  wait_for_cluster();  // until here others may read
}
#if MOET_SM == 90
KERNEL(STEP_THREADS, 1) streams_cluster(GRID_CONSTANT StreamsArgs p) { run_cluster<false>(p); }
CLUSTERS(streams_cluster)
KERNEL(STEP_THREADS, 1) streams_cluster_mixed(GRID_CONSTANT StreamsArgs p) { run_cluster<true>(p); }
CLUSTERS(streams_cluster_mixed)
#endif

// A lane's share of TILE rows: four channels of four streams times all rows of fn.
struct TileSums {
  float sum[TILE][MAX_OUTS], square[TILE];
};

DEVICE void load_rows(const StreamsArgs& p, int first, int last, int channel, uint2 (*old)[MULT], uint2* y) {
#pragma unroll
  for (int r = 0; r < TILE; r++) {
    int row = first + r < last ? first + r : last - 1;
#pragma unroll
    for (int k = 0; k < MULT; k++)
      old[r][k] = *reinterpret_cast<const uint2*>(p.streams + (uint64_t(row) * MULT + k) * p.dim + channel);
    if (p.y) y[r] = *reinterpret_cast<const uint2*>(p.y + uint64_t(row) * p.dim + channel);
  }
}

// Sums of all lanes of 32 values each; lane l gets value l in v[0], by the tree of warp_sum.
template <int HALF>
DEVICE void scatter_sums(float* v) {
  bool upper = threadIdx.x & HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    float send = upper ? v[i] : v[i + HALF], keep = upper ? v[i + HALF] : v[i];
    v[i] = add_rn(keep, shuffle_xor(send, HALF));
  }
  if constexpr (HALF > 1) scatter_sums<HALF / 2>(v);
}

// Many rows. Grid: blocks, then groups of rows_each rows. fn of a block lies in shared memory; a warp
// mixes and multiplies TILE rows at once.
KERNEL(TILE_THREADS, 1) streams_tiles(GRID_CONSTANT StreamsArgs p) {
  uint4* fn = reinterpret_cast<uint4*>(dynamic_shared());  // [out][stream][lane]
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = p.dim / BLOCK, block = blockIdx.x;
  int channel = block * BLOCK + lane * 4;
  int first = blockIdx.y * p.rows_each, last = first + p.rows_each < p.rows ? first + p.rows_each : p.rows;
  for (int i = threadIdx.x; i < MAX_OUTS * MULT * 32; i += TILE_THREADS)
    fn[i] = *reinterpret_cast<const uint4*>(p.fn + uint64_t(i >> 5) * p.dim + block * BLOCK + (i & 31) * 4);
  wait_for_previous_kernel();
  let_next_kernel_start();
  sync_threads();
  uint2 old[TILE][MULT], y[TILE] = {};
  int row = first + warp * TILE;
  if (row < last) load_rows(p, row, last, channel, old, y);
#pragma unroll 1
  for (; row < last; row += 8 * TILE) {
    TileSums t = {};
#pragma unroll
    for (int k = 0; k < MULT; k++) {
      Four v[TILE];
#pragma unroll
      for (int r = 0; r < TILE; r++) {
        int at = row + r < last ? row + r : last - 1;
        uint2 stream = old[r][k];
        if (p.y) {
          stream = mix_four(old[r], y[r], p.post[uint64_t(at) * MULT + k], p.mix + uint64_t(at) * MULT * MULT + k);
          if (row + r < last)
            *reinterpret_cast<uint2*>(p.mixed + (uint64_t(at) * MULT + k) * p.dim + channel) = stream;
        }
        v[r] = unpack_four(stream);
#pragma unroll
        for (int i = 0; i < 4; i++) t.square[r] = fma_rn(v[r].v[i], v[r].v[i], t.square[r]);
      }
#pragma unroll
      for (int out = 0; out < MAX_OUTS; out++) {
        uint4 u = fn[(out * MULT + k) * 32 + lane];
        uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int r = 0; r < TILE; r++)
#pragma unroll
          for (int i = 0; i < 4; i++) t.sum[r][out] = fma_rn(bits_float(w[i]), v[r].v[i], t.sum[r][out]);
      }
    }
    if (row + 8 * TILE < last) load_rows(p, row + 8 * TILE, last, channel, old, y);
#pragma unroll
    for (int r = 0; r < TILE; r++) {
      float values[PARTS] = {};
#pragma unroll
      for (int out = 0; out < MAX_OUTS; out++) values[out] = t.sum[r][out];
      values[PARTS - 1] = t.square[r];
      scatter_sums<16>(values);
      if (row + r < last) p.partial[(uint64_t(row + r) * blocks + block) * PARTS + lane] = values[0];
    }
  }
}
LAUNCHABLE(streams_tiles, StreamsArgs, TILE_THREADS)

// A CTA a row: what streams_tiles left.
KERNEL(STEP_THREADS, 3) streams_finish(GRID_CONSTANT StreamsArgs p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  finish_row(p, blockIdx.x, reinterpret_cast<float*>(dynamic_shared()), SiteValues<false>());
}
LAUNCHABLE(streams_finish, StreamsArgs, STEP_THREADS)
