// The sums of a head's tiles, each by a program of its own, joined in ascending order: bit for bit
// what join_latents of triton_mla_attention.py makes of them. All are asked for before any is used.
#include "attention_tile.cuh"

constexpr int LATENTS_THREADS = 128;  // four columns each
constexpr int WIDTH = 512, KEYS = 64;
constexpr int MAX_TILES = 32;

struct JoinLatentsArgs {
  const int64_t* positions;  // [rows]
  const float* part_acc;     // [rows, tiles, heads, WIDTH]
  const float* part_sum;     // [rows, tiles, heads, 2]: the largest logit and the sum of weights
  uint16_t* out;             // [rows, heads, WIDTH] bf16
  int tiles, heads, top_k;
};

// A head of a row to a CTA.
KERNEL(LATENTS_THREADS, 2) join_latents(GRID_CONSTANT JoinLatentsArgs p) {
  let_next_kernel_start();
  float* parts = reinterpret_cast<float*>(dynamic_shared());
  int row = blockIdx.x / p.heads, head = blockIdx.x - row * p.heads, thread = threadIdx.x;
  float* sums = parts + p.tiles * WIDTH;
  wait_for_previous_kernel();
  int64_t visible = p.positions[row] + 1;
  int seen = static_cast<int>(visible < p.top_k ? visible : p.top_k);
  int last = (seen + KEYS - 1) / KEYS;
  for (int i = 0; i < last; i++) {
    int64_t part = (static_cast<int64_t>(row) * p.tiles + i) * p.heads + head;
    copy16(parts + i * WIDTH + thread * 4, p.part_acc + part * WIDTH + thread * 4, true);
  }
  if (thread < last * 2) {
    int64_t part = (static_cast<int64_t>(row) * p.tiles + thread / 2) * p.heads + head;
    sums[thread] = p.part_sum[part * 2 + thread % 2];
  }
  commit_copies();
  wait_copies<0>();
  sync_threads();
  float top = -bits_float(0x7F800000u), total = 0.0f, acc[4] = {};
  for (int i = 0; i < last; i++) {
    float higher = larger(top, sums[2 * i]);
    float old = exp2_approx(add_rn(top, -higher)), fresh = exp2_approx(add_rn(sums[2 * i], -higher));
    total = fma_rn(fresh, sums[2 * i + 1], mul_rn(old, total));
    top = higher;
    const float* part = parts + i * WIDTH + thread * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) acc[j] = fma_rn(fresh, part[j], mul_rn(old, acc[j]));
  }
  float factor = total > 0.0f ? div_full(1.0f, total) : 0.0f;
  uint16_t* to = p.out + (static_cast<int64_t>(row) * p.heads + head) * WIDTH + thread * 4;
  uint32_t words[2];
#pragma unroll
  for (int j = 0; j < 2; j++)
    words[j] = to_bf16(mul_rn(acc[2 * j], factor)) |
               static_cast<uint32_t>(to_bf16(mul_rn(acc[2 * j + 1], factor))) << 16;
  *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
}
LAUNCHABLE(join_latents, JoinLatentsArgs, LATENTS_THREADS)
