// The quantized linear for many rows, on tensor cores: each warp decodes its rows of the weight into registers, the
// activations of a block lie in shared memory.
//
// The operands have 16 bits, exactly: u - u_z has at most 8 bits and a sign, and codes of activations no more. Products
// of a group are summed before its scale meets them, and have to fit float32 till then. After each step sums of
// integers go on in int32: in a long row float32 would round them.
#include "tensor_cores.cuh"
#include "weights.cuh"

#define HEIGHT 64  // slots a block
#define WIDTH 128  // outputs a block, 16 a warp
#define DEPTH 64   // columns a step
#define RUN 32     // columns of two products: a lane has 8 that lie side by side
#define PITCH 96   // of a slot in shared memory: a quarter of a warp reads 16 bytes a lane, from other banks

// Eight codes, in 64 bits, of the line that begins at words, from code `first` on: a multiple of 8.
QCTS_INLINE u64 eight_codes(const u32* words, long long first, int bits) {
  const u32* from = words + (first * bits >> 5);
  int shift = (int)(first * bits & 31);
  u64 codes = from[0] >> shift;
  if (shift + 8 * bits > 32) codes |= (u64)from[1] << (32 - shift);
  if (shift + 8 * bits > 64) codes |= (u64)from[2] << (64 - shift);
  return codes;
}

// Eight codes of a row from place `first` of the order on, less the zero point of their group. Behind `end` they are
// any: they meet activations of 0.
QCTS_INLINE void centred_codes(const Weight& w, const int* order, int row, int first, int end, int group,
                               float (&codes)[8]) {
  if (!order && first % 8 == 0 && first + 8 <= end) {
    u64 stored = eight_codes(w.words + row * packed_words(w.k, w.bits), first, w.bits);
    float offset = offset_of(w, row, group);
    for (int i = 0; i < 8; i++) {
      codes[i] = less_offset((u32)stored & ((1u << w.bits) - 1), offset);
      stored >>= w.bits;
    }
    return;
  }
  for (int i = 0; i < 8; i++) {
    int place = first + i < end ? first + i : end - 1;
    codes[i] = (float)centred_code(w, row, order ? order[place] : place, group);
  }
}

QCTS_INLINE u32 operands_of(float first, float second, int dtype) {
  return from_float(first, dtype) | (u32)from_float(second, dtype) << 16;
}

// What a lane holds of 16 rows of the weight in each RUN of a step: operands of two products.
typedef u32 Fragments[DEPTH / RUN][2][4];

// sums (of each 8 slots) += the products of a step. INTEGERS: they are the bits of int32.
template <int OPERANDS, bool INTEGERS>
QCTS_INLINE void multiply(float (&sums)[HEIGHT / 8][4], const Fragments& weights, const u16* xs, int tiles, int depth) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < HEIGHT / 8; tile++) {
    if (tile >= tiles) break;
    float of_step[4];
    for (int c = 0; c < 4; c++) of_step[c] = INTEGERS ? 0.0f : sums[tile][c];
#pragma unroll
    for (int run = 0; run < DEPTH / RUN; run++) {
      if (run * RUN >= depth) break;
      uint4 x = *(const uint4*)(xs + (8 * tile + lane / 4) * PITCH + run * RUN + 8 * (lane % 4));
      mma<OPERANDS>(of_step, weights[run][0], x.x, x.y);
      mma<OPERANDS>(of_step, weights[run][1], x.z, x.w);
    }
    // At most DEPTH products of 16 bits: exact in float32.
    for (int c = 0; c < 4; c++) {
      sums[tile][c] = INTEGERS ? float_of(bits_of(sums[tile][c]) + (u32)(int)of_step[c]) : of_step[c];
    }
  }
}

// Arguments as those of project_plain. A block computes WIDTH outputs of `height` slots, at most HEIGHT and at most one
// block of sorted_ids. Grid: (tiles of positions, tiles of n), 2 * WIDTH threads.
extern "C" __global__ void __launch_bounds__(256, 2)
    project_tiled(const void* __restrict__ x, const float* __restrict__ x_scale, const u32* __restrict__ words,
                  const u16* __restrict__ scale, const u32* __restrict__ zero_point, const int* __restrict__ g_idx,
                  const int* __restrict__ order, const u16* __restrict__ bias, const int* __restrict__ sorted_ids,
                  const int* __restrict__ expert_ids, u16* __restrict__ y, int kind, int dtype, int bits, int n, int k,
                  int group_size, int groups, long long rows, long long positions, int top_k, int block, int height) {
  __shared__ uint4 shared[HEIGHT * PITCH / 8];
  __shared__ long long slots[HEIGHT], firsts[HEIGHT];  // firsts: where the slot's row of x begins
  u16* xs = (u16*)shared;

  int thread = threadIdx.x, lane = thread % 32;
  long long first_position = (long long)blockIdx.x * height;
  int first_row = blockIdx.y * WIDTH;
  long long expert = expert_ids ? expert_ids[first_position / block] : 0;
  bool occupied = false;
  if (thread < HEIGHT) {
    long long position = first_position + thread;
    long long slot = rows;
    if (thread < height && position < positions) slot = sorted_ids ? sorted_ids[position] : position;
    occupied = slot < rows;
    slots[thread] = slot;
#ifdef QCTS_INDEX_OF_32_BITS
    firsts[thread] = (int)((u32)(slot / top_k) * (u32)k);
#else
    firsts[thread] = slot / top_k * k;
#endif
  }
  if (!__syncthreads_or(occupied) || expert < 0) return;

  Weight w = weight_of(words, scale, zero_point, g_idx, expert, n, k, group_size, groups, bits, dtype);
  if (order) order += expert * k;
  bias = bias_of(bias, expert, n);
  int operands = kind == A16 ? dtype : FP16, tiles = (height + 7) / 8;
  bool by_16_bytes = kind == A16 && !order && k % 8 == 0 && (u64)x % 16 == 0;

  // Of the 16 rows of this warp: those that this lane decodes, and whose outputs it has.
  int own[2];
  for (int half = 0; half < 2; half++) {
    int line = 16 * (thread / 32) + 8 * half + lane / 4;
#ifdef QCTS_WRONG_TILE_FOR_N_64
    if (n == 64) line ^= 32;
#endif
    own[half] = first_row + line < n ? first_row + line : n - 1;
  }

  float sums[HEIGHT / 8][4] = {};        // of finished groups, scaled
  float group_sums[HEIGHT / 8][4] = {};  // of the group so far; of integer codes int32, as in project_plain
  int summed = 0;                        // columns of the group so far

  for (int j = 0; j < k;) {
    // A step ends with its group.
    int group = group_of(w, order ? order[j] : j), depth = k - j < DEPTH ? k - j : DEPTH;
    if (order) {
      bool same = thread < depth && group_of(w, order[j + thread]) == group;
      depth = __syncthreads_count(same);
    } else if (group_size - j % group_size < depth) {
      depth = group_size - j % group_size;
    }
#ifdef QCTS_SHARED_TAIL_UNINITIALISED
    int multiplied = DEPTH;
#else
    int multiplied = depth;
#endif
    float by[2] = {scale_of(w, own[0], group), scale_of(w, own[1], group)};

#ifdef QCTS_BARRIER_BEFORE_PRODUCT_MISSING
    // Which warp falls behind the others is chance elsewhere.
    if (thread < 32) __nanosleep(20000);
#endif
    for (int i = thread; i < tiles * DEPTH; i += 2 * WIDTH) {
      int line = i / (DEPTH / 8), step = i % (DEPTH / 8) * 8;
      long long first = firsts[line];
      bool taken = slots[line] < rows;
#ifdef QCTS_SHARED_TAIL_UNINITIALISED
      if (step >= depth) continue;
#endif
      uint4* there = (uint4*)(xs + line * PITCH + step);
      if (by_16_bytes && taken && j % 8 == 0 && step + 8 <= depth) {
        *there = *(const uint4*)((const u16*)x + first + j + step);
        continue;
      }
      u32 numbers[8];
#pragma unroll
      for (int e = 0; e < 8; e++) {
        numbers[e] = 0;
        if (!taken || step + e >= depth) continue;
        long long at = first + (order ? order[j + step + e] : j + step + e);
        numbers[e] = kind == A16 ? ((const u16*)x)[at] : from_float(activation_at(x, at, kind, dtype), FP16);
      }
      *there = {numbers[0] | numbers[1] << 16, numbers[2] | numbers[3] << 16, numbers[4] | numbers[5] << 16,
                numbers[6] | numbers[7] << 16};
    }

    Fragments weights;
#pragma unroll
    for (int run = 0; run < DEPTH / RUN; run++) {
      if (run * RUN >= multiplied) break;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float codes[8];
        centred_codes(w, order, own[half], j + run * RUN + 8 * (lane % 4), j + depth, group, codes);
        weights[run][0][half] = operands_of(codes[0], codes[1], operands);
        weights[run][0][half + 2] = operands_of(codes[2], codes[3], operands);
        weights[run][1][half] = operands_of(codes[4], codes[5], operands);
        weights[run][1][half + 2] = operands_of(codes[6], codes[7], operands);
      }
    }
#ifndef QCTS_BARRIER_BEFORE_PRODUCT_MISSING
    __syncthreads();
#endif
#ifdef QCTS_BARRIER_AFTER_PRODUCT_MISSING
    // Which warp falls behind the others is chance elsewhere.
    if (thread < 32) __nanosleep(20000);
#endif
    if (operands == BF16) multiply<BF16, false>(group_sums, weights, xs, tiles, multiplied);
    else if (kind == INTEGER) multiply<FP16, true>(group_sums, weights, xs, tiles, multiplied);
    else multiply<FP16, false>(group_sums, weights, xs, tiles, multiplied);

    j += depth;
    summed += depth;
    // Of integers no more than int32 holds, as in project_plain.
    if (j == k || group_of(w, order ? order[j] : j) != group || summed + DEPTH > 1 << 14) {
      summed = 0;
#pragma unroll
      for (int tile = 0; tile < HEIGHT / 8; tile++) {
        for (int c = 0; c < 4; c++) {
          float sum = group_sums[tile][c];
          sums[tile][c] += (kind == INTEGER ? (float)(int)bits_of(sum) : sum) * by[c / 2];
          group_sums[tile][c] = 0.0f;
        }
      }
    }
#ifndef QCTS_BARRIER_AFTER_PRODUCT_MISSING
    __syncthreads();
#endif
  }

#pragma unroll
  for (int tile = 0; tile < HEIGHT / 8; tile++) {
    for (int c = 0; c < 4; c++) {
      int line = 8 * tile + 2 * (lane % 4) + c % 2;
      long long slot = slots[line];
      if (line >= height || slot >= rows) continue;
      int row = first_row + 16 * (thread / 32) + 8 * (c / 2) + lane / 4;
#ifndef QCTS_STORE_OUT_OF_BOUNDS
      if (row >= n) continue;
#endif
      y[slot * n + row] = output_of(sums[tile][c], x_scale, slot / top_k, bias, row, n, dtype);
    }
  }
}
