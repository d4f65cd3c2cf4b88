// The quantized linear for many rows: tiles of outputs, their operands decoded into shared memory.
#include "weights.cuh"

#define TILE 64          // rows and columns of outputs a block
#define DEPTH 32         // columns of x a step
#define PITCH (TILE + 1) // of a line in shared memory: neighbouring columns lie in other banks
#define SIDE 16          // threads along either side of a tile; each has 4 x 4 outputs, SIDE apart

// How many columns from j on, in the order of summation, belong to the group of the first; at most DEPTH.
QCTS_INLINE int columns_of_group(const Weight& w, const int* order, int j) {
  int most = w.k - j < DEPTH ? w.k - j : DEPTH;
  if (!order) {
    int left = w.group_size - j % w.group_size;
    return left < most ? left : most;
  }
  int group = group_of(w, order[j]), count = 1;
  while (count < most && group_of(w, order[j + count]) == group) count++;
  return count;
}

// Arguments as those of project_plain. A block computes TILE outputs of `height` rows: of TILE, or of one block of
// sorted_ids where those are smaller. Grid: (tiles of positions, tiles of n), SIDE * SIDE threads.
extern "C" __global__ void __launch_bounds__(256)
    project_tiled(const void* __restrict__ x, const float* __restrict__ x_scale, const u32* __restrict__ words,
                  const u16* __restrict__ scale, const u32* __restrict__ zero_point, const int* __restrict__ g_idx,
                  const int* __restrict__ order, const u16* __restrict__ bias, const int* __restrict__ sorted_ids,
                  const int* __restrict__ expert_ids, u16* __restrict__ y, int kind, int dtype, int bits, int n, int k,
                  int group_size, int groups, long long rows, long long positions, int top_k, int block, int height) {
  __shared__ float xs[DEPTH * PITCH], ws[DEPTH * PITCH];
  __shared__ long long slots[TILE];

  int thread = threadIdx.x, across = thread % SIDE, down = thread / SIDE;
  long long first_position = (long long)blockIdx.x * height;
  int first_row = blockIdx.y * TILE;
  long long expert = expert_ids ? expert_ids[first_position / block] : 0;
  bool occupied = false;
  if (thread < TILE) {
    long long position = first_position + thread;
    long long slot = rows;
    if (thread < height && position < positions) slot = sorted_ids ? sorted_ids[position] : position;
    slots[thread] = slot;
    occupied = slot < rows;
  }
  if (!__syncthreads_or(occupied) || expert < 0) return;

  Weight w = weight_of(words, scale, zero_point, g_idx, expert, n, k, group_size, groups, bits, dtype);
  if (order) order += expert * k;
  bias = bias_of(bias, expert, n);

  float sums[4][4] = {};   // of finished groups, scaled
  int products[4][4] = {};  // of integer codes in the group so far: exact, as in project_plain
  int summed = 0;          // columns in products

  for (int j = 0; j < k;) {
    // A step of integer codes ends with its group, so that products are of one group.
    int depth = kind == INTEGER ? columns_of_group(w, order, j) : (k - j < DEPTH ? k - j : DEPTH);

    for (int i = thread; i < TILE * DEPTH; i += SIDE * SIDE) {
      int line = i / DEPTH, step = i % DEPTH;
#ifdef QCTS_SHARED_TAIL_UNINITIALISED
      if (step >= depth) continue;
#endif
      float activation = 0.0f, weight = 0.0f;
      if (step < depth) {
        int column = order ? order[j + step] : j + step;
        long long slot = slots[line];
        if (slot < rows) {
#ifdef QCTS_INDEX_OF_32_BITS
          activation = activation_at(x, (int)((u32)(slot / top_k) * (u32)k) + column, kind, dtype);
#else
          activation = activation_at(x, slot / top_k * k + column, kind, dtype);
#endif
        }
#ifdef QCTS_WRONG_TILE_FOR_N_64
        int row = first_row + (n == 64 ? line ^ 32 : line);
#else
        int row = first_row + line;
#endif
        if (row < n) {
          weight =
              kind == INTEGER ? (float)centred_code(w, row, column, group_of(w, column)) : weight_at(w, row, column);
        }
      }
      xs[step * PITCH + line] = activation;
      ws[step * PITCH + line] = weight;
    }
#ifndef QCTS_BARRIER_BEFORE_PRODUCT_MISSING
    __syncthreads();
#endif
#ifdef QCTS_BARRIER_AFTER_PRODUCT_MISSING
    // Which warp falls behind the others is chance elsewhere.
    if (thread < 32) __nanosleep(20000);
#endif

    float step_sums[4][4] = {};
#ifdef QCTS_SHARED_TAIL_UNINITIALISED
    for (int step = 0; step < DEPTH; step++)
#else
    for (int step = 0; step < depth; step++)
#endif
      for (int r = 0; r < 4; r++) {
        float activation = xs[step * PITCH + down + SIDE * r];
        for (int c = 0; c < 4; c++) step_sums[r][c] += activation * ws[step * PITCH + across + SIDE * c];
      }
    j += depth;
    summed += depth;
    bool finished = true;
    if (kind == INTEGER) {
      int last = order ? order[j - 1] : j - 1;
      finished = j == k || group_of(w, order ? order[j] : j) != group_of(w, last) || summed + DEPTH > 1 << 14;
    }
    if (finished) summed = 0;
    for (int c = 0; c < 4; c++) {
      int row = first_row + across + SIDE * c;
      float by = 1.0f;
      if (kind == INTEGER && finished && row < n) by = scale_of(w, row, group_of(w, order ? order[j - 1] : j - 1));
      for (int r = 0; r < 4; r++) {
        if (kind != INTEGER) {
          sums[r][c] += step_sums[r][c];
          continue;
        }
        products[r][c] += (int)step_sums[r][c];  // at most DEPTH products of 16 bits: exact in float32
        if (finished) sums[r][c] += (float)products[r][c] * by, products[r][c] = 0;
      }
    }
#ifndef QCTS_BARRIER_AFTER_PRODUCT_MISSING
    __syncthreads();
#endif
  }

  for (int r = 0; r < 4; r++) {
    long long slot = slots[down + SIDE * r];
    if (slot >= rows) continue;
    for (int c = 0; c < 4; c++) {
      int row = first_row + across + SIDE * c;
#ifndef QCTS_STORE_OUT_OF_BOUNDS
      if (row >= n) continue;
#endif
      y[slot * n + row] = output_of(sums[r][c], x_scale, slot / top_k, bias, row, n, dtype);
    }
  }
}
