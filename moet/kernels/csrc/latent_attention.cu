// Latent attention of many rows over chosen positions: up to 64 heads share one key of 512 values and 64 that are
// turned. A CTA takes rows in turn: one warpgroup decodes keys, two others multiply, each with half of the values.
//
// A tile of keys is summed by itself, relative to its own maximum, and tiles are joined in ascending order, with
// the very operations of triton_mla_attention.py: a row has the same bits in both.
#include "latent_keys.cuh"
#include "latent_tile.cuh"

#if MOET_SM == 90  // sm_120a has no room for a tile of keys

// Up to 64 heads are the rows of the matrix instructions.
template <class Key>
struct ManyHeads : LatentKeys<Key, 64> {
  using Base = LatentKeys<Key, 64>;
  using Base::p, Base::group, Base::full, Base::empty, Base::tile, Base::queries, Base::queries_full;
  HeadRows<WIDTH / 64> heads;

  DEVICE ManyHeads(const LatentArgs& args) : Base(args) {
    heads.lane = Base::lane, heads.warp = Base::warp, heads.group = group;
  }

  DEVICE void run() {
    this->begin();
    if (group == 2) {
      give_registers<88>();
      this->decode_all();
    } else {
      take_registers<208>();
      attend_all();
    }
  }

  DEVICE void attend_all() {
    int stage = 0, parity = 0, query_parity = 0;
    for (int row = this->first_row(); row >= 0; row -= gridDim.x) {
      LatentSight s = this->sight_of(p.positions[row], 0);
      heads.clear();
      barrier_wait(queries_full(), query_parity);
      query_parity ^= 1;
      int tiles = s.tiles();
#pragma unroll 1
      for (int i = 0; i < tiles; i++) {
        barrier_wait(full(stage), parity);
        Weighed w;
        int count = s.visible - i * KEYS;
        heads.weigh_tile(queries(), tile(stage), count, p.scale, i + 1 == tiles, Base::queries_empty(), w);
        heads.join_tile(tile(stage), w, empty(stage));
        if (++stage == TILES_HELD) stage = 0, parity ^= 1;
      }
      bool real = p.positions[row] >= 0;
      float factor[2] = {div_full(1.0f, heads.total[0]) * SMALL, div_full(1.0f, heads.total[1]) * SMALL};
#pragma unroll
      for (int b = 0; b < 4; b++) {
#pragma unroll
        for (int i = 0; i < 32; i++) heads.acc[b][i] = real ? mul_rn(heads.acc[b][i], factor[i >> 1 & 1]) : 0.0f;
        heads.store(p.out, row, p.heads, b, heads.acc[b]);
      }
    }
  }
};

// Up to 32 heads, of a rank, are the columns of the matrix instructions, keys and then values their rows: none
// is empty. A warpgroup weighs every other tile, by way of shared memory in the order of ManyHeads, whose bits
// these are; both multiply each tile with half of the values.
constexpr int FEW_HEADS = 32, ROW_OF_LOGITS = KEYS + 4;

template <class Key>
struct FewHeads : LatentKeys<Key, FEW_HEADS> {
  using Base = LatentKeys<Key, FEW_HEADS>;
  using Base::p, Base::lane, Base::warp, Base::group, Base::full, Base::empty, Base::tile;
  using Base::queries, Base::queries_full, Base::queries_empty, Base::weighed;
  float acc[4][16], top[8], total[8];  // of heads 8 (i / 2) + 2 (lane & 3) + i % 2

  DEVICE FewHeads(const LatentArgs& args) : Base(args) {}

  // Behind what was chosen: weights of a tile, [32][64] bf16; logits of a warpgroup's; maxima and sums.
  DEVICE uint8_t* weights(int s) const {
    return reinterpret_cast<uint8_t*>(Base::chosen() + MAX_CHOSEN) + s * FEW_HEADS * 128;
  }
  DEVICE float* logits() const {
    return reinterpret_cast<float*>(weights(TILES_HELD)) + group * FEW_HEADS * ROW_OF_LOGITS;
  }
  DEVICE float* sums(int s) const {
    return reinterpret_cast<float*>(weights(TILES_HELD)) + 2 * FEW_HEADS * ROW_OF_LOGITS + s * 2 * FEW_HEADS;
  }

  DEVICE void run() {
    this->begin();
    if (group == 2) {
      give_registers<104>();
      this->decode_all();
    } else {
      take_registers<200>();
      attend_all();
    }
  }

  // A tile's logits, turned round; then as ManyHeads::weigh: four lanes a head.
  DEVICE void weigh(int s, int count, bool last) {
    float part[16];
    mma_begin();
#pragma unroll
    for (int b = 0; b < WIDTH / 64; b++)
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_keys(part, tile(s) + b * BLOCK_BYTES, queries() + b * Base::QUERY_BYTES, k, b + k > 0);
    mma_commit();
    mma_wait<0>();
    results_are_here<16>(part);
    if (last) leave(queries_empty(), lane);
    float* to = logits() + 2 * (lane & 3) * ROW_OF_LOGITS + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 16; i++) to[(i / 4 * 8 + (i & 1)) * ROW_OF_LOGITS + 8 * (i >> 1 & 1)] = part[i];
    sync_warpgroup(group);
    int head = warp * 8 + (lane >> 2), t = lane & 3;
    const float* from = logits() + head * ROW_OF_LOGITS + 2 * t;
    float v[16], highest = bits_float(0xFF800000u), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int key = i / 2 * 8 + (i & 1);
      v[i] = key + 2 * t < count ? mul_rn(from[key], p.scale) : bits_float(0xFF800000u);
      highest = larger(highest, v[i]);
    }
    highest = larger(highest, shuffle_xor(highest, 2));
    highest = larger(highest, shuffle_xor(highest, 1));
    uint8_t* out = weights(s) + head * 128 + t * 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
      float a = exp2_approx(add_rn(v[2 * n], -highest)), b = exp2_approx(add_rn(v[2 * n + 1], -highest));
      sum = n ? add_rn(add_rn(sum, a), b) : add_rn(a, b);
      uint32_t word = to_bf16(a) | static_cast<uint32_t>(to_bf16(b)) << 16;
      *reinterpret_cast<uint32_t*>(out + ((n ^ (head & 7)) * 16)) = word;
    }
    sum = add_rn(sum, shuffle_xor(sum, 2));
    sum = add_rn(sum, shuffle_xor(sum, 1));
    if (t == 0) sums(s)[head] = highest, sums(s)[FEW_HEADS + head] = sum;
    fence_shared_for_matrix_units();
    barrier_arrive(weighed(s));
  }

  DEVICE void join(int s) {
    float part[16], old[8], fresh[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int head = i / 2 * 8 + 2 * (lane & 3) + (i & 1);
      float part_top = sums(s)[head], part_total = sums(s)[FEW_HEADS + head];
      float higher = larger(top[i], part_top);
      old[i] = exp2_approx(add_rn(top[i], -higher)), fresh[i] = exp2_approx(add_rn(part_top, -higher));
      total[i] = fma_rn(fresh[i], part_total, mul_rn(old[i], total[i]));
      top[i] = higher;
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
      mma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_values(part, tile(s) + (group * 4 + b) * BLOCK_BYTES, weights(s), k, k > 0);
      mma_commit();
      mma_wait<0>();
      results_are_here<16>(part);
      if (b == 3) leave(empty(s), lane);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        int h = i / 4 * 2 + (i & 1);
        acc[b][i] = fma_rn(fresh[h], part[i], mul_rn(old[h], acc[b][i]));
      }
    }
  }

  DEVICE void attend_all() {
    int done = 0, query_parity = 0;  // tiles so far
    for (int row = this->first_row(); row >= 0; row -= gridDim.x) {
      LatentSight s = this->sight_of(p.positions[row], 0);
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 16; i++) acc[b][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) top[i] = bits_float(0xFF800000u), total[i] = 0.0f;
      barrier_wait(queries_full(), query_parity);
      query_parity ^= 1;
      int tiles = s.tiles();
      if (group >= tiles) leave(queries_empty(), lane);  // has none to weigh
#pragma unroll 1
      for (int i = 0; i < tiles; i += 2) {
        int own = i + group;
        if (own < tiles) {
          int stage = (done + own) % TILES_HELD;
          barrier_wait(full(stage), (done + own) / TILES_HELD & 1);
          weigh(stage, s.visible - own * KEYS, own + 2 >= tiles);
        }
#pragma unroll 1
        for (int j = i; j < i + 2 && j < tiles; j++) {
          int stage = (done + j) % TILES_HELD;
          barrier_wait(weighed(stage), (done + j) / TILES_HELD & 1);
          join(stage);
        }
      }
      done += tiles;
      finish(row);
    }
  }

  // Lanes of neighbouring columns exchange: each stores two columns of one head.
  DEVICE void finish(int row) const {
    int odd = lane >> 2 & 1;
    bool real = p.positions[row] >= 0;
#pragma unroll
    for (int h = 0; h < 8; h += 2) {
      float even_factor = div_full(1.0f, total[h]) * SMALL, odd_factor = div_full(1.0f, total[h + 1]) * SMALL;
      int head = h * 4 + 2 * (lane & 3) + odd;
      uint16_t* to = p.out + (uint64_t(row) * p.heads + head) * LATENT + group * 256 + warp * 16 + (lane >> 3) * 2;
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          uint32_t first = to_bf16(mul_rn(acc[b][2 * h + 2 * r], even_factor));
          uint32_t second = to_bf16(mul_rn(acc[b][2 * h + 2 * r + 1], odd_factor));
          uint32_t theirs = shuffle(odd ? first : second, lane ^ 4);
          uint32_t word = odd ? theirs | second << 16 : first | theirs << 16;
          if (head < p.heads) *reinterpret_cast<uint32_t*>(to + b * 64 + r * 8) = real ? word : 0;
        }
    }
  }
};

KERNEL(LATENT_THREADS, 1) attend_chosen_nvfp4(GRID_CONSTANT LatentArgs args) { ManyHeads<Nvfp4Key>(args).run(); }
LAUNCHABLE(attend_chosen_nvfp4, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_chosen_fp8(GRID_CONSTANT LatentArgs args) { ManyHeads<Fp8Key>(args).run(); }
LAUNCHABLE(attend_chosen_fp8, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_few_nvfp4(GRID_CONSTANT LatentArgs args) { FewHeads<Nvfp4Key>(args).run(); }
LAUNCHABLE(attend_few_nvfp4, LatentArgs, LATENT_THREADS)
KERNEL(LATENT_THREADS, 1) attend_few_fp8(GRID_CONSTANT LatentArgs args) { FewHeads<Fp8Key>(args).run(); }
LAUNCHABLE(attend_few_fp8, LatentArgs, LATENT_THREADS)
#endif
