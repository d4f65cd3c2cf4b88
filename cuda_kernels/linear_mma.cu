// Weights of 4 bits and activations of 16 bits, at most 16 tokens: each word is read once, 16 bytes at a time, and
// goes to the tensor cores as the integer that its codes stand for.
//
// The product is mma.m16n8k16 with 16 rows of the weight as its A, 8 tokens as its B. A lane holds places (k) of both;
// which column of x a place means is free, as long as A and B agree. In a block of 128 columns lane `quad` of a row
// takes the 32 columns from quad * 32 on, one 16-byte load, and spends them in eight steps of four. A word of eight
// codes 0..7 gives the pairs (0, 4), (1, 5), (2, 6), (3, 7) by a shift and a mask each, so B is put into pairs alike.
//
// Codes become numbers of 16 bits by setting bits and one multiplication and addition, exactly (code_pair). Each block
// of columns is summed in float32, multiplied by its scale there, and added.
//
// Words are copied to shared memory a step ahead, each lane's by itself and for itself: it waits for nobody. The
// 16 warps of a block are groups of neighbours along n, which share activations: the more neighbours, the less often x
// is read. Activations, scales and zero points are put in order in shared memory before the first step, so that the
// steps read nothing else from memory but words and need few instructions: 16 tokens keep a multiprocessor as busy as
// the words keep memory. K is split over the groups of a block and the blocks of a cluster; of these each sends the
// other those sums that the other adds. And a launch begins while the one before it still runs: its first words and its
// scales do not depend on that.
#include "tensor_cores.cuh"
#include "weights.cuh"

#define WARPS_LOG 4
#define WARPS (1 << WARPS_LOG)
#define TILES 2             // of 16 rows, a warp
#define BLOCK_COLUMNS 128   // of K, a step of a warp
#define PIECES (2 * TILES)  // of 16 bytes, which a lane takes in a step: of rows 8 apart
#define SLOT (PIECES * 32)  // pieces that a warp takes in a step
#define PACKED_X (4 * 32)   // pieces of 16 bytes, 8 tokens of a block of columns
#define STAGES 2            // steps of words in shared memory or on their way there: more of them come no sooner

// ---- copies to shared memory that a thread does not wait for

QCTS_INLINE u32 shared_address(const void* pointer) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return (u32)address;
}

// 16 bytes past L1, where the scales are: no word is read twice. The other half of 128 bytes is for another group, or
// the step after.
QCTS_INLINE void copy_ahead(u32 to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

QCTS_INLINE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until of this thread's copies only those of the last step may be on their way.
QCTS_INLINE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory"); }

QCTS_INLINE uint4 copied(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- warps that share activations

// What any of so many threads, a group's, wrote before is seen by all of them after.
QCTS_INLINE void meet_group(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");  // 0 is that of the whole block
}

// ---- what was launched before; from sm_90 on it may still run while this begins

// The launch after this one may begin as soon as there is room for it.
QCTS_INLINE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until it has ended and what it wrote can be read. Weights are read before: no launch of a running model changes them.
QCTS_INLINE void await_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- the blocks of a cluster; before sm_90 each is alone

QCTS_INLINE int cluster_blocks() {
  u32 blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));  // volatile: no register keeps it through the loop
#endif
  return (int)blocks;
}

QCTS_INLINE int cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return (int)rank;
}

QCTS_INLINE int cluster_number() {
#if __CUDA_ARCH__ >= 900
  u32 number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return (int)number;
#else
  return blockIdx.x;
#endif
}

// Nothing is known of the other blocks of the cluster until await_cluster ends: then they have begun.
QCTS_INLINE void begin_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

QCTS_INLINE void await_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address, in the memory of the cluster, of what a block has where this one has an address of its own.
QCTS_INLINE u32 in_block(u32 address, int rank) {
  u32 there = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// A thread says how many bytes this block will get from others, before it begins in the cluster.
QCTS_INLINE void expect(u32 barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// To another block, whose barrier counts the bytes; both are addresses in the memory of the cluster.
QCTS_INLINE void send(u32 to, float2 v, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(v.x), "f"(v.y), "r"(barrier)
               : "memory");
#endif
}

// Until what all warps of this block have written is there, and, where something is expected, that too.
QCTS_INLINE void await_sums(bool expected, u32 barrier) {
#ifdef QCTS_BARRIER_BEFORE_REDUCTION_MISSING
  __syncwarp();
#else
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  u32 there = !expected;
  while (!there) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(there)
        : "r"(barrier)
        : "memory");
  }
#endif
#endif
}

// ---- numbers

QCTS_INLINE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
QCTS_INLINE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Two numbers of 16 bits at once: a * b + c.
template <int DTYPE>
QCTS_INLINE u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 result;
  if (DTYPE == BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// (a & mask) | bits, in one instruction; the compiler makes two of it.
QCTS_INLINE u32 masked_or(u32 a, u32 mask, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// What is added to the codes i = 0, 2 of a word: -(32 + zero / 4) in bf16, -(1024 + zero) in fp16.
template <int DTYPE>
QCTS_INLINE u32 even_offset(u32 zero) {
  return (DTYPE == BF16 ? 0xc200 : 0xe400) | zero;
}

// And to i = 1, 3: -zero / 4 in bf16, -(64 + zero) in fp16. Both offsets are pairs of the same number.
template <int DTYPE>
QCTS_INLINE u32 odd_offset(u32 even) {
  return fma_pair<DTYPE>(even, DTYPE == BF16 ? 0x3f803f80 : 0x3c003c00, DTYPE == BF16 ? 0x42004200 : 0x63806380);
}

// Codes i and i + 4 of a word, less the zero point, exactly: as they are in fp16, a fourth of them in bf16. One shift
// serves two i, for shifts and masks are what the multiprocessor is slowest at.
//
// Low four bits: 128 + u in bf16, times 1/4, or 1024 + u in fp16. The next four: 1024 + 16 u in fp16, times 1/16; in
// bf16 there is room for three of them below the exponent. But the numbers whose exponent is 0 or 1 lie evenly, on
// multiples of 2^-133: without further bits it is 16 u * 2^-133, times 2^127.
template <int DTYPE>
QCTS_INLINE u32 code_pair(u32 word, int i, u32 even, u32 odd) {
  u32 shifted = i < 2 ? word : word >> 8;
  if (i % 2 == 0) {
    u32 pair = masked_or(shifted, 0x000f000f, DTYPE == BF16 ? 0x43004300 : 0x64006400);
    return fma_pair<DTYPE>(pair, DTYPE == BF16 ? 0x3e803e80 : 0x3c003c00, even);
  }
  u32 pair = DTYPE == BF16 ? shifted & 0x00f000f0 : masked_or(shifted, 0x00f000f0, 0x64006400);
  return fma_pair<DTYPE>(pair, DTYPE == BF16 ? 0x7f007f00 : 0x2c002c00, odd);
}

// By what a product of such numbers is multiplied besides the scale.
template <int DTYPE>
QCTS_INLINE float unit_of_codes() {
  return DTYPE == BF16 ? 4.0f : 1.0f;
}

// The same number, but the compiler does not know that: it keeps no multiples of it in registers through the loop.
QCTS_INLINE int anew(int number) {
  asm volatile("mov.b32 %0, %0;" : "+r"(number));
  return number;
}

// ---- the product

// Where in shared memory the steps find what meets the words, of so many blocks of columns from `first` on.
//
// x: in pairs, (blocks, TOKEN_TILES, 4 words, 32 lanes); of odd words lanes are swapped by fours, so that a warp that
// writes whole sectors of x reaches all banks alike. Of tokens that are not there whatever was there stays: they are
// columns of the product that nobody asks for.
// factors: (blocks, side, 8 lines, PIECES), padded by 16 bytes a block against conflicts. Each is the scale's bits, and
// above them the even offset. That of several blocks (group_size) is there once for each.
struct Table {
  uint4 *x, *factors;
  int first, blocks;
};

QCTS_INLINE int factors_of_block(int side) { return side * 8 + 1; }  // pieces of 16 bytes

// The part of the table that a warp fills: x of its group's blocks of columns, every splits-th from `split` on,
// together with its neighbours; the factors of these blocks for its own rows.
struct Share {
  int split, splits, neighbour, side, first_row;
};

// What a thread moves to the table at a time: 16 bytes of each token, scales of eight rows. All of it is loaded before
// any of it is stored.
#define X_AT_ONCE (2 * WARPS)  // blocks of columns
#define FACTORS_AT_ONCE 8      // blocks of a group

template <int TOKENS>
struct LoadedX {
  uint4 of_token[TOKENS];
};

struct LoadedFactors {
  u16 scale[8];
  u32 zero_points;
};

// A thread's place in x: a warp has two blocks, eight lanes have whole sectors of 32 bytes.
struct XPlace {
  int block, quad, word;
};

QCTS_INLINE XPlace x_place(int batch, const Share& share) {
  int lane = anew(threadIdx.x) % 32, number = (batch * share.side + share.neighbour) * 2 + lane / 16;
  return {number * share.splits + share.split, lane / 2 % 4, lane % 2 + lane / 8 % 2 * 2};
}

template <int TOKENS>
QCTS_INLINE void load_x(LoadedX<TOKENS>& loaded, const Table& table, const Share& share, int batch, const u16* x,
                        int first_token, int tokens, int k) {
  XPlace at = x_place(batch, share);
  if (at.block >= table.blocks) return;
  k = anew(k);
  u32 place = (table.first + at.block) * BLOCK_COLUMNS + at.quad * 32 + at.word * 8;
  for (int i = 0; i < TOKENS; i++) {
    if (first_token + i < tokens) loaded.of_token[i] = __ldg((const uint4*)(x + (place + (u32)(first_token + i) * k)));
  }
}

template <int TOKEN_TILES, int TOKENS>
QCTS_INLINE void store_x(const LoadedX<TOKENS>& loaded, const Table& table, const Share& share, int batch,
                         int first_token, int tokens) {
  XPlace at = x_place(batch, share);
  if (at.block >= table.blocks) return;
  int swap = at.word % 2 * 4;
  uint4* even_tokens = table.x + ((at.block * TOKEN_TILES * 4 + at.word) * 32 + at.quad + swap);
  uint4* odd_tokens = even_tokens - 2 * swap;
  for (int i = 0; i < TOKENS; i++) {
    int token = first_token + i;
    uint4 v = loaded.of_token[i];
#ifdef QCTS_MMA_PAIRS_OF_SECOND_NEIGHBOURS
    v = {v.x, v.z, v.y, v.w};  // (0, 2), (1, 3), ... beside (0, 4), (1, 5), ... of the weight
#endif
    v = {low_halves(v.x, v.z), high_halves(v.x, v.z), low_halves(v.y, v.w), high_halves(v.y, v.w)};
    if (token < tokens) (i % 2 ? odd_tokens : even_tokens)[token / 8 * PACKED_X + token % 8 * 4] = v;
  }
}

// A thread's place in the factors: those of one piece for each of the 8 lines, in one block.
QCTS_INLINE int factor_block(int batch, const Share& share) {
  return (batch * FACTORS_AT_ONCE + anew(threadIdx.x) % 32 / 4) * share.splits + share.split;
}

QCTS_INLINE void load_factors(LoadedFactors& loaded, const Table& table, const Share& share, int batch,
                              const Weight& w) {
  int block = factor_block(batch, share), row = share.first_row + anew(threadIdx.x) % 4 * 8;
  if (block >= table.blocks || row >= w.n) return;
  u32 group = (u32)(table.first + block) / (u32)(w.group_size / BLOCK_COLUMNS);
  int groups = anew(w.groups);
  const u16* from = w.scale + ((u32)row * groups + group);
  for (int line = 0; line < 8; line++) loaded.scale[line] = __ldg(from + line * groups);
  loaded.zero_points = w.zero_point ? __ldg(w.zero_point + ((u32)row / 8 * groups + group)) : 0x88888888;
}

template <int DTYPE>
QCTS_INLINE void store_factors(const LoadedFactors& loaded, const Table& table, const Share& share, int batch, int n) {
  int block = factor_block(batch, share), piece = anew(threadIdx.x) % 4;
  if (block >= table.blocks || share.first_row >= n) return;
  u32* to = (u32*)(table.factors + block * factors_of_block(share.side) + share.neighbour * 8) + piece;
  for (int line = 0; line < 8; line++) {
    to[line * PIECES] = loaded.scale[line] | even_offset<DTYPE>(loaded.zero_points >> 4 * line & 15) << 16;
  }
}

// A warp's share of the table from a batch on, with few registers.
template <int DTYPE, int TOKEN_TILES>
QCTS_INLINE void fill_table(const Table& table, const Share& share, int batch, const u16* x, int tokens,
                            const Weight& w) {
#pragma unroll 1
  for (int b = batch; b * FACTORS_AT_ONCE * share.splits < table.blocks; b++) {
    LoadedFactors loaded;
    load_factors(loaded, table, share, b, w);
    store_factors<DTYPE>(loaded, table, share, b, w.n);
  }
#pragma unroll 1
  for (int b = batch; b * X_AT_ONCE < table.blocks; b++) {
#pragma unroll 1
    for (int token = 0; token < 8 * TOKEN_TILES; token += 4) {
      LoadedX<4> loaded;
      load_x(loaded, table, share, b, x, token, tokens, w.k);
      store_x<TOKEN_TILES>(loaded, table, share, b, token, tokens);
    }
  }
}

// What a lane takes in a step, from `piece` on, to its place in a slot of the ring.
QCTS_INLINE void copy_step(u32 slot, const uint4* pieces, u32 piece, u32 eight_rows) {
  for (int p = 0; p < PIECES; p++) copy_ahead(slot + p * 32 * 16, pieces + (piece + p * eight_rows));
}

// TOKEN_TILES: of 8 tokens. The warps of a block are groups of 2^side_log neighbours along n. The blocks of a cluster
// have the same rows, and each has `range` blocks of columns.
template <int DTYPE, int TOKEN_TILES>
QCTS_INLINE void project(const u16* x, const Weight& w, const u16* bias, u16* y, int tokens, int side_log, int range,
                         int packed_blocks, uint4* shared) {
  constexpr int PAIRS = TILES * TOKEN_TILES * 2;  // of sums, a lane
  constexpr int STAGE = WARPS * SLOT * 16;        // bytes of the ring
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, quad = lane % 4;
  int side = 1 << side_log, split_log = WARPS_LOG - side_log, splits = 1 << split_log, split = warp >> side_log;
  int neighbour = warp & side - 1, first_row = (cluster_number() * side + neighbour) * 16 * TILES;

  int blocks = w.k / BLOCK_COLUMNS, begin = cluster_rank() * range;
  int end = begin + range < blocks ? begin + range : blocks;
  int steps = 0;  // n is a multiple of what a warp computes
  if (first_row < w.n && begin + split < end) steps = (end - begin - split + splits - 1) >> split_log;

  // The ring of words: (STAGES, WARPS, PIECES, 32 lanes).
  u32 ring = shared_address(shared + warp * SLOT + lane), slot = ring, both_slots = 2 * ring + STAGE;
  u32 piece = (u32)(first_row + line) * (w.k / 32) + (begin + split) * 4 + quad, eight_rows = w.k / 4;
  const uint4* pieces = (const uint4*)w.words;
  int cluster = cluster_blocks();
  // What the other block of a cluster sends, (pairs that this one adds, splits, 32 lanes, 2 tokens); whether it came.
  uint4* const received = shared + STAGES * WARPS * SLOT;
  u32 barrier = shared_address(received + PAIRS * WARPS * 8);
  uint4* const packed = cluster > 1 ? received + PAIRS * WARPS * 8 + 8 : received;
  Table table = {packed, packed + packed_blocks * TOKEN_TILES * PACKED_X, begin, packed_blocks};
  if (end - begin < packed_blocks) table.blocks = end - begin;
  Share share = {split, splits, neighbour, side, first_row};

  // One step of words keeps memory busy. What the first step needs besides comes next: it does not queue behind the
  // rest of the ring.
  if (steps > 0) copy_step(ring, pieces, piece, eight_rows);
  end_of_copies();
  LoadedFactors loaded_factors;
  load_factors(loaded_factors, table, share, 0, w);
  if (cluster > 1) {
    if (threadIdx.x == 0) expect(barrier, PAIRS * WARPS * 128);
    __syncwarp();
    begin_in_cluster();
  }
  await_launch_before();
  LoadedX<8 * TOKEN_TILES> loaded_x;
  load_x(loaded_x, table, share, 0, x, 0, tokens, w.k);
  piece += splits * 4;
  if (steps > 1) copy_step(ring + STAGE, pieces, piece, eight_rows);
  end_of_copies();
  store_factors<DTYPE>(loaded_factors, table, share, 0, w.n);
  store_x<TOKEN_TILES>(loaded_x, table, share, 0, 0, tokens);
  fill_table<DTYPE, TOKEN_TILES>(table, share, 1, x, tokens, w);

  float sums[TILES][TOKEN_TILES][4] = {};
  int left = steps;
  while (true) {
    meet_group(split, side * 32);
    u32 activations = shared_address(table.x + anew(split) * TOKEN_TILES * PACKED_X + anew(lane));
    u32 factor = shared_address(table.factors + anew(split) * factors_of_block(side) + neighbour * 8 + anew(lane) / 4);
    int after = left - (packed_blocks >> split_log);
    if (after < 0) after = 0;
#pragma unroll 1
    for (; left > after; left--) {
      wait_for_copies();
      u32 words[PIECES][4];
      for (int p = 0; p < PIECES; p++) {
        uint4 v = copied(slot + p * 32 * 16);
        words[p][0] = v.x, words[p][1] = v.y, words[p][2] = v.z, words[p][3] = v.w;
      }
      uint4 f = copied(factor);
      u32 even[PIECES] = {f.x, f.y, f.z, f.w}, odd[PIECES];
      for (int p = 0; p < PIECES; p++) {
        even[p] = high_halves(even[p], even[p]);
        odd[p] = odd_offset<DTYPE>(even[p]);
      }

      // The words are in registers: the slot is free before they are spent.
      piece += splits * 4;
      if (left > STAGES) copy_step(slot, pieces, piece, eight_rows);
      end_of_copies();
      slot = both_slots - slot;

      float products[TILES][TOKEN_TILES][4] = {};
      u32 of_odd_words = activations ^ 64;
      for (int word = 0; word < 4; word++) {
        uint4 b[TOKEN_TILES];  // pair i of word: columns (i, i + 4)
        for (int m = 0; m < TOKEN_TILES; m++) {
          b[m] = copied((word % 2 ? of_odd_words : activations) + (m * 4 + word) * 32 * 16);
        }
        for (int t = 0; t < TILES; t++) {
          for (int i = 0; i < 4; i += 2) {
            u32 a[4];
            for (int j = 0; j < 4; j++) {
              int p = 2 * t + j % 2;
              a[j] = code_pair<DTYPE>(words[p][word], i + j / 2, even[p], odd[p]);
            }
            for (int m = 0; m < TOKEN_TILES; m++) {
              mma<DTYPE>(products[t][m], a, i == 0 ? b[m].x : b[m].z, i == 0 ? b[m].y : b[m].w);
            }
          }
        }
      }
      f = copied(factor);  // again: registers are short
      u32 both[PIECES] = {f.x, f.y, f.z, f.w};
      for (int p = 0; p < PIECES; p++) {
        float scale = to_float((u16)both[p], DTYPE);
        int t = p / 2, c = p % 2 * 2;
        for (int m = 0; m < TOKEN_TILES; m++) {
          sums[t][m][c] += products[t][m][c] * scale;
          sums[t][m][c + 1] += products[t][m][c + 1] * scale;
        }
      }
      activations += splits * TOKEN_TILES * PACKED_X * 16;
      factor += splits * factors_of_block(side) * 16;
    }
    // The columns after these, where shared memory does not hold all: when the group is done with them.
    table.first += packed_blocks;
    if (table.first >= end) break;
    if (end - table.first < packed_blocks) table.blocks = end - table.first;
    meet_group(split, side * 32);
    share.first_row = (cluster_number() * side + neighbour) * 16 * TILES;  // anew: no register keeps it meanwhile
    fill_table<DTYPE, TOKEN_TILES>(table, share, 0, x, tokens, w);
  }

  // Sums go by pairs, of two tokens of a row; each of a cluster's blocks adds every other pair. A warp puts those that
  // its own block adds, (PAIRS, 32 lanes), where its first slot was: no copy is on its way there any more.
  cluster = cluster_blocks();
  int rank = cluster_rank();
  if (cluster > 1) await_cluster();
  __syncwarp();
  float2* own = (float2*)(shared + warp * SLOT) + lane;
  int peer = rank ^ cluster - 1;
  u32 theirs = in_block(shared_address((float2*)received + (neighbour * PAIRS / 2 * splits + split) * 32 + lane), peer);
  u32 their_barrier = in_block(barrier, peer);
  for (int i = 0; i < PAIRS; i++) {
    float2 pair;
    for (int token = 0; token < 2; token++) {
      float sum = sums[i / (2 * TOKEN_TILES)][i / 2 % TOKEN_TILES][i % 2 * 2 + token] * unit_of_codes<DTYPE>();
#ifdef QCTS_PARTIAL_SUMS_OF_16_BITS
      sum = to_float(from_float(sum, DTYPE), DTYPE);
#endif
      (token == 0 ? pair.x : pair.y) = sum;
    }
    if (cluster == 1 || i % 2 == rank) own[i * 32] = pair;
    else send(theirs + i / 2 * splits * 256, pair, their_barrier);
  }
  await_sums(cluster > 1, barrier);
  // A warp adds a pair over the parts of K, always in the same order.
#pragma unroll 1
  for (int number = warp; number < side * PAIRS >> cluster - 1; number += WARPS) {
    int pair = number * cluster + rank, i = pair % PAIRS, rows = pair / PAIRS * 16 * TILES;
    const float2* here = (const float2*)(shared + pair / PAIRS * SLOT) + (i * 32 + lane);
    const float2* there = (const float2*)received + (number * splits * 32 + lane);
    float2 added = {};
#pragma unroll 4
    for (int part = 0; part < splits; part++) {
      float2 ours = here[part * side * SLOT * 2], others = {};
      if (cluster > 1) others = there[part * 32];
#ifdef QCTS_SPLIT_DROPPED
      if (cluster > 1) others = {};
      else if (part == 1) ours = {};
#endif
      float2 first = rank == 0 ? ours : others, second = rank == 0 ? others : ours;
      added.x += first.x, added.y += first.y;
      added.x += second.x, added.y += second.y;
    }
    // Where the mma leaves it.
    int token = i / 2 % TOKEN_TILES * 8 + 2 * quad;
    int row = cluster_number() * side * 16 * TILES + rows + i / (2 * TOKEN_TILES) * 16 + i % 2 * 8 + line;
    if (row >= w.n) continue;
    u16* to = y + ((long long)token * w.n + row);
    if (token < tokens) *to = output_of(added.x, nullptr, token, bias, row, w.n, DTYPE);
    if (token + 1 < tokens) to[w.n] = output_of(added.y, nullptr, token + 1, bias, row, w.n, DTYPE);
  }
}

// x: (tokens, k) of 16 bits; words, scale, zero_point, bias as in weights.cuh, of one matrix. k and group_size are
// multiples of 128, n of 32, tokens at most 16; x and words begin at multiples of 16 bytes. side_log: 1 to 4. range:
// how many blocks of 128 columns a block of a cluster has, all those of K over the blocks of a cluster, rounded up.
// packed_blocks: for how many of them x and the factors are in shared memory at a time, a multiple of 16 >> side_log.
// Grid: n / (32 << side_log) rounded up, times the blocks of a cluster (1 or 2), 512 threads. Shared memory, where
// token_tiles is tokens / 8 rounded up: 64 KB; token_tiles * 8 KB and 128 bytes in a cluster of 2; and for each of
// packed_blocks token_tiles * 2 KB and (128 << side_log) + 16 bytes.
extern "C" __global__ void __launch_bounds__(512)
    project_mma4(const u16* __restrict__ x, const u32* __restrict__ words, const u16* __restrict__ scale,
                 const u32* __restrict__ zero_point, const u16* __restrict__ bias, u16* __restrict__ y, int dtype,
                 int tokens, int n, int k, int group_size, int side_log, int range, int packed_blocks) {
  extern __shared__ __align__(128) uint4 shared[];
  let_next_begin();
  Weight w = weight_of(words, scale, zero_point, nullptr, 0, n, k, group_size, k / group_size, 4, dtype);
  if (dtype == BF16) {
    if (tokens <= 8) project<BF16, 1>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
    else project<BF16, 2>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
  } else {
    if (tokens <= 8) project<FP16, 1>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
    else project<FP16, 2>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
  }
}
