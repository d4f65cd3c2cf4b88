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
#include "weights.cuh"

#define WARPS 16
#define TILES 2             // of 16 rows, a warp
#define BLOCK_COLUMNS 128   // of K, a step of a warp


// Past L1, where the activations are: no word is read twice.
QCTS_INLINE uint4 streamed(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

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

// The words of a lane for one block of columns. Row h of tile t is row 16 t + 8 h + lane / 4 of the warp's.
struct Words {
  uint4 of[TILES][2];
};

// from: of row 0 of the lane's; eight_rows: how far row 8 is from there.
QCTS_INLINE Words words_at(const uint4* from, long long eight_rows) {
  Words words;
  for (int t = 0; t < TILES; t++) {
    for (int h = 0; h < 2; h++) words.of[t][h] = streamed(from + (2 * t + h) * eight_rows);
  }
  return words;
}

// TOKEN_TILES: of 8 tokens. A block computes 32 * side rows: its warps are `side` neighbours along n, times WARPS /
// side that share K between them.
template <int DTYPE, int TOKEN_TILES>
QCTS_INLINE void project(const u16* x, const Weight& w, const u16* bias, u16* y, int tokens, int side, float* shared) {
  constexpr int SUMS = TILES * TOKEN_TILES * 4;  // a lane
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, quad = lane % 4;
  int splits = WARPS / side, split = warp / side;
  int first_row = (blockIdx.x * side + warp % side) * 16 * TILES;

  float sums[TILES][TOKEN_TILES][4] = {};
  int blocks = first_row < w.n ? w.k / BLOCK_COLUMNS : 0;  // n is a multiple of what a warp computes
  int blocks_of_group = w.group_size / BLOCK_COLUMNS;
  long long eight_rows = w.k / 4;
  const uint4* from = (const uint4*)w.words + (long long)(first_row + line) * (w.k / 32) + split * 4 + quad;
  const uint4* activations = (const uint4*)(x + (long long)line * w.k) + split * 16 + quad * 4;
  const u16* scales = w.scale + (long long)(first_row + line) * w.groups;
  const u32* zero_points = w.zero_point + first_row / 8 * (long long)w.groups;
  Words next;
  if (split < blocks) next = words_at(from, eight_rows);
#pragma unroll 1
  for (int block = split; block < blocks; block += splits) {
    Words words = next;
    uint4 columns[TOKEN_TILES][4];  // of token line, 8 a load
    for (int m = 0; m < TOKEN_TILES; m++) {
      for (int i = 0; i < 4; i++) {
        columns[m][i] = 8 * m + line < tokens ? __ldg(activations + m * (long long)w.k + i) : uint4{0, 0, 0, 0};
      }
    }
    activations += splits * 16;
    int group = blocks_of_group == 1 ? block : block / blocks_of_group;
    u16 scale[TILES][2];
    u32 offset[TILES][2];
    for (int t = 0; t < TILES; t++) {
      for (int h = 0; h < 2; h++) {
        scale[t][h] = scales[(2 * t + h) * 8 * w.groups + group];
        offset[t][h] = negated_offset<DTYPE>(8);
      }
    }
    if (w.zero_point) {
      for (int t = 0; t < TILES; t++) {
        for (int h = 0; h < 2; h++) {  // a word holds those of eight rows
          offset[t][h] = negated_offset<DTYPE>(zero_points[(2 * t + h) * w.groups + group] >> 4 * line & 15);
        }
      }
    }
    from += splits * 4;
    if (block + splits < blocks) next = words_at(from, eight_rows);

    u32 b[TOKEN_TILES][4][4];  // pair i of word: columns (i, i + 4)
    for (int m = 0; m < TOKEN_TILES; m++) {
      for (int word = 0; word < 4; word++) {
        uint4 v = columns[m][word];
#ifdef QCTS_MMA_PAIRS_OF_SECOND_NEIGHBOURS
        v = {v.x, v.z, v.y, v.w};  // (0, 2), (1, 3), ... beside (0, 4), (1, 5), ... of the weight
#endif
        b[m][word][0] = low_halves(v.x, v.z);
        b[m][word][1] = high_halves(v.x, v.z);
        b[m][word][2] = low_halves(v.y, v.w);
        b[m][word][3] = high_halves(v.y, v.w);
      }
    }

    for (int t = 0; t < TILES; t++) {
      const u32 low[4] = {words.of[t][0].x, words.of[t][0].y, words.of[t][0].z, words.of[t][0].w};
      const u32 high[4] = {words.of[t][1].x, words.of[t][1].y, words.of[t][1].z, words.of[t][1].w};
      float products[TOKEN_TILES][4] = {};
      for (int word = 0; word < 4; word++) {
        for (int i = 0; i < 4; i += 2) {
          u32 a[4];
          for (int next_pair = 0; next_pair < 2; next_pair++) {
            a[2 * next_pair] = code_pair<DTYPE>(low[word], i + next_pair, offset[t][0]);
            a[2 * next_pair + 1] = code_pair<DTYPE>(high[word], i + next_pair, offset[t][1]);
          }
          for (int m = 0; m < TOKEN_TILES; m++) mma<DTYPE>(products[m], a, b[m][word][i], b[m][word][i + 1]);
        }
      }
      for (int m = 0; m < TOKEN_TILES; m++) {
        for (int c = 0; c < 4; c++) sums[t][m][c] += products[m][c] * to_float(scale[t][c / 2], DTYPE);
      }
    }
  }

  // Each warp's sums, (WARPS, SUMS, 32), are added over the splits of K.
  for (int t = 0; t < TILES; t++) {
    for (int m = 0; m < TOKEN_TILES; m++) {
      for (int c = 0; c < 4; c++) {
        float sum = sums[t][m][c];
#ifdef QCTS_PARTIAL_SUMS_OF_16_BITS
        sum = to_float(from_float(sum, DTYPE), DTYPE);
#endif
        shared[(warp * SUMS + (t * TOKEN_TILES + m) * 4 + c) * 32 + lane] = sum;
      }
    }
  }
#ifndef QCTS_BARRIER_BEFORE_REDUCTION_MISSING
  __syncthreads();
#endif
  int rows_here = side * 16 * TILES;
  for (int i = threadIdx.x; i < rows_here * 8 * TOKEN_TILES; i += blockDim.x) {
    int here = i % rows_here, token = i / rows_here, row = blockIdx.x * rows_here + here;
    if (row >= w.n || token >= tokens) continue;
    // Where the mma leaves row `here % 16` of tile t and token `token % 8` of token tile m.
    int t = here / 16 % TILES, m = token / 8, c = here % 16 / 8 * 2 + token % 2, owner = here % 8 * 4 + token % 8 / 2;
    float sum = 0.0f;
    for (int s = 0; s < splits; s++) {
#ifdef QCTS_SPLIT_DROPPED
      if (s == 1) continue;
#endif
      int of = s * side + here / (16 * TILES);
      sum += shared[(of * SUMS + (t * TOKEN_TILES + m) * 4 + c) * 32 + owner];
    }
    y[(long long)token * w.n + row] = output_of(sum, nullptr, token, bias, row, w.n, DTYPE);
  }
}

// x: (tokens, k) of 16 bits; words, scale, zero_point, bias as in weights.cuh, of one matrix. k and group_size are
// multiples of 128, n of 32, tokens at most 16; x and words begin at multiples of 16 bytes. Grid: n / (32 * side)
// rounded up, 512 threads.
extern "C" __global__ void __launch_bounds__(512)
    project_mma4(const u16* __restrict__ x, const u32* __restrict__ words, const u16* __restrict__ scale,
                 const u32* __restrict__ zero_point, const u16* __restrict__ bias, u16* __restrict__ y, int dtype,
                 int tokens, int n, int k, int group_size, int side) {
  __shared__ float shared[WARPS * TILES * 2 * 4 * 32];
  Weight w = weight_of(words, scale, zero_point, nullptr, 0, n, k, group_size, k / group_size, 4, dtype);
  if (dtype == BF16) {
    if (tokens <= 8) project<BF16, 1>(x, w, bias, y, tokens, side, shared);
    else project<BF16, 2>(x, w, bias, y, tokens, side, shared);
  } else {
    if (tokens <= 8) project<FP16, 1>(x, w, bias, y, tokens, side, shared);
    else project<FP16, 2>(x, w, bias, y, tokens, side, shared);
  }
}
