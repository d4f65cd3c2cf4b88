// Weights of 4 bits and activations of 16 bits, at most 16 tokens: each word is read once, 16 bytes at a time, and
// goes to the tensor cores as the integer that its codes stand for.
//
// The product is mma.m16n8k16 with 16 rows of the weight as its A, 8 tokens as its B. A lane holds places (k) of both;
// which column of x a place means is free, as long as A and B agree. In a block of 128 columns lane `quad` of a row
// takes the 32 columns from quad * 32 on, one 16-byte load, and spends them in eight steps of four. A word of eight
// codes 0..7 gives the pairs (0, 4), (1, 5), (2, 6), (3, 7) by a shift and a mask each, so B is put into pairs alike.
//
// Codes become 128 + u in bf16 or 1024 + u in fp16 by setting bits, and lose 128 + u_z exactly. Each block of columns
// is summed in float32, multiplied by its scale there, and added.
//
// Time is what memory takes, if enough of it is on its way: words are copied to shared memory several steps ahead, each
// lane's by itself and for itself, so that it waits for nobody. The 16 warps of a block share the activations; the more
// of them are neighbours along n, the less often x is read. K is then split over the blocks of a cluster, which add
// their sums through each other's shared memory.
#include "weights.cuh"

#define WARPS_LOG 4
#define WARPS (1 << WARPS_LOG)
#define TILES 2             // of 16 rows, a warp
#define BLOCK_COLUMNS 128   // of K, a step of a warp
#define PIECES (2 * TILES)  // of 16 bytes, which a lane takes in a step: of rows 8 apart
#define SLOT (PIECES * 32)  // pieces that a warp takes in a step
#define PACKED_X (4 * 32)   // pieces of 16 bytes, 8 tokens of a block of columns
#define MOST_BLOCKS 8       // of a cluster

// How many steps of words are in shared memory or on their way there, 32 KB each.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define STAGES 2  // a block has 99 KB
#elif __CUDA_ARCH__ >= 900
#define STAGES 4  // 227 KB
#else
#define STAGES 3  // 163 KB
#endif

// ---- copies to shared memory that a thread does not wait for

QCTS_INLINE u32 shared_address(const void* pointer) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return (u32)address;
}

// 16 bytes past L1, where the scales are: no word is read twice. The other half of 128 bytes is for the step after.
QCTS_INLINE void copy_ahead(u32 to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

QCTS_INLINE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until of the groups of this thread's copies only the last STAGES - 1 may be on their way.
QCTS_INLINE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory"); }

QCTS_INLINE uint4 copied(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- the blocks of a cluster; before sm_90 each is alone

QCTS_INLINE int cluster_blocks() {
  u32 blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
  return (int)blocks;
}

QCTS_INLINE int cluster_rank() {
  u32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return (int)rank;
}

QCTS_INLINE int cluster_number() {
#if __CUDA_ARCH__ >= 900
  u32 number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));  // volatile: no register keeps it through the loop
  return (int)number;
#else
  return blockIdx.x;
#endif
}

// What any thread of the cluster wrote before is seen by all of them after.
QCTS_INLINE void meet_cluster() {
#ifdef QCTS_BARRIER_BEFORE_REDUCTION_MISSING
  __syncwarp();
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// A block's shared memory lasts until its peers have read it. Nothing was written for them, so nothing is released.
QCTS_INLINE void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// What lies at an address of this block's shared memory in that of a peer.
QCTS_INLINE float of_peer(u32 address, int peer) {
  float value;
#if __CUDA_ARCH__ >= 900
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(peer));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}

// ---- numbers

QCTS_INLINE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
QCTS_INLINE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Two numbers -(128 + zero) in bf16, or -(1024 + zero) in fp16.
template <int DTYPE>
QCTS_INLINE u32 negated_offset(u32 zero) {
  u32 number = (DTYPE == BF16 ? 0xc300 : 0xe400) | zero;
  return number << 16 | number;
}

// Codes i and i + 4 of a word, less the zero point, as two numbers of 16 bits.
template <int DTYPE>
QCTS_INLINE u32 code_pair(u32 word, int i, u32 offset) {
  u32 pair, result;
  // (word >> 4 i & mask) | exponent
  asm("lop3.b32 %0, %1, %2, %3, 0xea;"
      : "=r"(pair) : "r"(word >> 4 * i), "r"(0x000f000f), "r"(DTYPE == BF16 ? 0x43004300 : 0x64006400));
  if (DTYPE == BF16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x3f803f80), "r"(offset));  // times 1
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(offset));
  }
  return result;
}

template <int DTYPE>
QCTS_INLINE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (DTYPE == BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- the product

// Columns of x, so many blocks of them from `first` on, put into pairs and into the order in which lanes read them:
// (blocks, TOKEN_TILES, 4 words, 32 lanes). Tokens that are not there are zeros.
template <int TOKEN_TILES>
QCTS_INLINE void pack_activations(const u16* x, int k, int tokens, int first, int blocks, uint4* packed) {
  // A warp takes two tokens, 256 bytes of each: whole lines of x, and every bank of shared memory alike.
  int quad = threadIdx.x % 4, word = threadIdx.x / 8 % 4, line = threadIdx.x / 32 % 4 * 2 + threadIdx.x / 4 % 2;
  int tile = threadIdx.x / PACKED_X, token = tile % TOKEN_TILES * 8 + line;
  constexpr int TILES_AT_ONCE = 32 * WARPS / PACKED_X, BLOCKS_AT_ONCE = TILES_AT_ONCE / TOKEN_TILES;
  int block = tile / TOKEN_TILES;
  const u16* from = x + (long long)token * k + (first + block) * BLOCK_COLUMNS + quad * 32 + word * 8;
  uint4* to = packed + (tile * 4 + word) * 32 + line * 4 + quad;
  for (; block < blocks; block += 4 * BLOCKS_AT_ONCE) {
    uint4 loaded[4];  // on their way together
    for (int j = 0; j < 4; j++) {
      bool there = token < tokens && block + j * BLOCKS_AT_ONCE < blocks;
      loaded[j] = there ? __ldg((const uint4*)(from + j * BLOCKS_AT_ONCE * BLOCK_COLUMNS)) : uint4{0, 0, 0, 0};
    }
    for (int j = 0; j < 4; j++) {
      uint4 v = loaded[j];
#ifdef QCTS_MMA_PAIRS_OF_SECOND_NEIGHBOURS
      v = {v.x, v.z, v.y, v.w};  // (0, 2), (1, 3), ... beside (0, 4), (1, 5), ... of the weight
#endif
      v = {low_halves(v.x, v.z), high_halves(v.x, v.z), low_halves(v.y, v.w), high_halves(v.y, v.w)};
      if (block + j * BLOCKS_AT_ONCE < blocks) to[j * TILES_AT_ONCE * PACKED_X] = v;
    }
    from += 4 * BLOCKS_AT_ONCE * BLOCK_COLUMNS;
    to += 4 * TILES_AT_ONCE * PACKED_X;
  }
}

// What a lane's pieces of a step are multiplied by. Piece p is of row 8 p + line.
struct Factors {
  u16 scale[PIECES];
  u32 zero_points[PIECES];  // of eight rows each
};

// first_scale, first_word: of group 0 of piece 0.
QCTS_INLINE Factors factors_of(const Weight& w, u32 first_scale, u32 first_word, int group) {
  Factors factors;
  for (int p = 0; p < PIECES; p++) factors.scale[p] = __ldg(w.scale + (first_scale + group + p * 8 * w.groups));
  if (w.zero_point) {
    for (int p = 0; p < PIECES; p++) {
      factors.zero_points[p] = __ldg(w.zero_point + (first_word + group + p * w.groups));
    }
  }
  return factors;
}

// TOKEN_TILES: of 8 tokens. The warps of a block are 2^side_log neighbours along n, times 2^split_log that share
// columns between them. The blocks of a cluster have the same rows, and each has `range` blocks of columns.
template <int DTYPE, int TOKEN_TILES>
QCTS_INLINE void project(const u16* x, const Weight& w, const u16* bias, u16* y, int tokens, int side_log, int range,
                         int packed_blocks, uint4* shared) {
  constexpr int SUMS = TILES * TOKEN_TILES * 4;  // a lane
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, quad = lane % 4;
  int side = 1 << side_log, split_log = WARPS_LOG - side_log, splits = 1 << split_log, split = warp >> side_log;
  int first_row = (cluster_number() * side + (warp & side - 1)) * 16 * TILES;

  int blocks = w.k / BLOCK_COLUMNS, begin = cluster_rank() * range;
  int end = begin + range < blocks ? begin + range : blocks;
  int steps = 0;  // n is a multiple of what a warp computes
  if (first_row < w.n && begin + split < end) steps = (end - begin - split + splits - 1) >> split_log;

  // The ring of words: (STAGES, WARPS, PIECES, 32 lanes).
  u32 ring = shared_address(shared + warp * SLOT + lane), slot = ring;
  u32 piece = (u32)(first_row + line) * (w.k / 32) + (begin + split) * 4 + quad, eight_rows = w.k / 4;
  const uint4* pieces = (const uint4*)w.words;
  for (int s = 0; s < STAGES; s++) {
    if (s < steps) {
      for (int p = 0; p < PIECES; p++) {
        copy_ahead(ring + (s * WARPS * SLOT + p * 32) * 16, pieces + (piece + p * eight_rows));
      }
      piece += splits * 4;
    }
    end_of_copies();
  }

  int blocks_of_group = w.group_size / BLOCK_COLUMNS;
  u32 first_scale = (u32)(first_row + line) * w.groups, first_word = (u32)first_row / 8 * w.groups;
  u32 offset[PIECES];
  for (int p = 0; p < PIECES; p++) offset[p] = negated_offset<DTYPE>(8);
  Factors next = {};
  if (steps > 0) next = factors_of(w, first_scale, first_word, (begin + split) / blocks_of_group);

  uint4* packed = shared + STAGES * WARPS * SLOT;
  float sums[TILES][TOKEN_TILES][4] = {};
  int step = 0;
  for (int first = begin; first < end; first += packed_blocks) {
    if (first != begin) __syncthreads();  // all are done with the columns before
    int here = end - first < packed_blocks ? end - first : packed_blocks;
    pack_activations<TOKEN_TILES>(x, w.k, tokens, first, here, packed);
    __syncthreads();
    const uint4* activations = packed + split * TOKEN_TILES * PACKED_X + lane;
    int after = (first - begin + packed_blocks) >> split_log;
    if (after > steps) after = steps;
#pragma unroll 1
    for (; step < after; step++) {
      float scale[PIECES];
      for (int p = 0; p < PIECES; p++) scale[p] = to_float(next.scale[p], DTYPE);
      if (w.zero_point) {
        for (int p = 0; p < PIECES; p++) offset[p] = negated_offset<DTYPE>(next.zero_points[p] >> 4 * line & 15);
      }
      int block = begin + split + ((step + 1 < steps ? step + 1 : step) << split_log);
      next = factors_of(w, first_scale, first_word, blocks_of_group == 1 ? block : block / blocks_of_group);

      wait_for_copies();
      u32 words[PIECES][4];
      for (int p = 0; p < PIECES; p++) {
        uint4 v = copied(slot + p * 32 * 16);
        words[p][0] = v.x, words[p][1] = v.y, words[p][2] = v.z, words[p][3] = v.w;
      }

      float products[TILES][TOKEN_TILES][4] = {};
      for (int word = 0; word < 4; word++) {
        uint4 b[TOKEN_TILES];  // pair i of word: columns (i, i + 4)
        for (int m = 0; m < TOKEN_TILES; m++) b[m] = activations[(m * 4 + word) * 32];
        for (int t = 0; t < TILES; t++) {
          for (int i = 0; i < 4; i += 2) {
            u32 a[4];
            for (int j = 0; j < 4; j++) {
              int p = 2 * t + j % 2;
              a[j] = code_pair<DTYPE>(words[p][word], i + j / 2, offset[p]);
            }
            for (int m = 0; m < TOKEN_TILES; m++) {
              mma<DTYPE>(products[t][m], a, i == 0 ? b[m].x : b[m].z, i == 0 ? b[m].y : b[m].w);
            }
          }
        }
      }
      for (int t = 0; t < TILES; t++) {
        for (int m = 0; m < TOKEN_TILES; m++) {
          for (int c = 0; c < 4; c++) sums[t][m][c] += products[t][m][c] * scale[2 * t + c / 2];
        }
      }
      activations += splits * TOKEN_TILES * PACKED_X;

      // The words of this slot are spent.
      if (step + STAGES < steps) {
        for (int p = 0; p < PIECES; p++) copy_ahead(slot + p * 32 * 16, pieces + (piece + p * eight_rows));
        piece += splits * 4;
      }
      end_of_copies();
      slot = slot == ring + (STAGES - 1) * WARPS * SLOT * 16 ? ring : slot + WARPS * SLOT * 16;
    }
  }

  // Each warp's sums, (SUMS, 32), to where its first slot was: no copy is on its way any more.
  float* own = (float*)(shared + warp * SLOT);
  __syncwarp();
  for (int t = 0; t < TILES; t++) {
    for (int m = 0; m < TOKEN_TILES; m++) {
      for (int c = 0; c < 4; c++) {
        float sum = sums[t][m][c];
#ifdef QCTS_PARTIAL_SUMS_OF_16_BITS
        sum = to_float(from_float(sum, DTYPE), DTYPE);
#endif
        own[((t * TOKEN_TILES + m) * 4 + c) * 32 + lane] = sum;
      }
    }
  }
  meet_cluster();
  int cluster = cluster_blocks(), rows_before = cluster_number() * side * 16 * TILES;
  // Sum number s of a warp is added over the parts of K, always in the same order, by one warp of the cluster.
  for (int i = cluster_rank() * WARPS + warp; i < side * SUMS; i += cluster * WARPS) {
    int s = i % SUMS, of = i / SUMS, c = s % 4, m = s / 4 % TOKEN_TILES, t = s / (4 * TOKEN_TILES);
    // Where the mma leaves it.
    int token = 8 * m + 2 * quad + c % 2, row = rows_before + of * 16 * TILES + 16 * t + 8 * (c / 2) + line;
    if (row >= w.n || token >= tokens) continue;
    float sum = 0.0f;
#pragma unroll 1
    for (int part = 0; part < splits; part++) {
      u32 theirs = shared_address(shared + (part * side + of) * SLOT) + (s * 32 + lane) * 4;
      float parts[MOST_BLOCKS];  // the reads of all are on their way together
      for (int peer = 0; peer < MOST_BLOCKS; peer++) parts[peer] = peer < cluster ? of_peer(theirs, peer) : 0.0f;
#ifdef QCTS_SPLIT_DROPPED
      if (cluster > 1) parts[1] = 0.0f;
      else if (part == 1) parts[0] = 0.0f;
#endif
      for (int peer = 0; peer < MOST_BLOCKS; peer++) sum += parts[peer];
    }
    y[(long long)token * w.n + row] = output_of(sum, nullptr, token, bias, row, w.n, DTYPE);
  }
  __syncwarp();
  if (cluster > 1) leave_cluster();
}

// x: (tokens, k) of 16 bits; words, scale, zero_point, bias as in weights.cuh, of one matrix. k and group_size are
// multiples of 128, n of 32, tokens at most 16; x and words begin at multiples of 16 bytes. side_log: 0 to 4. range:
// how many blocks of 128 columns a block of a cluster has, all those of K over the blocks of a cluster, rounded up.
// packed_blocks: for how many of them x is packed at a time, a multiple of 16 >> side_log. Grid: n / (32 << side_log)
// rounded up, times the blocks of a cluster (up to 8), 512 threads. Shared memory: STAGES * 32 KB, and packed_blocks *
// 2 KB for each 8 tokens.
extern "C" __global__ void __launch_bounds__(512)
    project_mma4(const u16* __restrict__ x, const u32* __restrict__ words, const u16* __restrict__ scale,
                 const u32* __restrict__ zero_point, const u16* __restrict__ bias, u16* __restrict__ y, int dtype,
                 int tokens, int n, int k, int group_size, int side_log, int range, int packed_blocks) {
  extern __shared__ uint4 shared[];
  Weight w = weight_of(words, scale, zero_point, nullptr, 0, n, k, group_size, k / group_size, 4, dtype);
  if (dtype == BF16) {
    if (tokens <= 8) project<BF16, 1>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
    else project<BF16, 2>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
  } else {
    if (tokens <= 8) project<FP16, 1>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
    else project<FP16, 2>(x, w, bias, y, tokens, side_log, range, packed_blocks, shared);
  }
}
