// The quantized linear, one thread an output: y = x W^T + bias, and the same for the tokens of experts.
#include "weights.cuh"

// x: (tokens, k) of u16, or codes with x_scale float32 (tokens). The weight: a stack of matrices as in weights.cuh;
// order: the columns of each matrix sorted by g_idx, (experts, k), or null. bias: (experts, n) or null.
//
// Dense: sorted_ids is null, output row p is token p, positions = rows. Experts: position p of sorted_ids names a
// slot, a row of y, if it is below rows; its token is slot / top_k; its matrix is expert_ids[p / block], none where
// that is negative.
extern "C" __global__ void project_plain(const void* __restrict__ x, const float* __restrict__ x_scale,
                                         const u32* __restrict__ words, const u16* __restrict__ scale,
                                         const u32* __restrict__ zero_point, const int* __restrict__ g_idx,
                                         const int* __restrict__ order, const u16* __restrict__ bias,
                                         const int* __restrict__ sorted_ids, const int* __restrict__ expert_ids,
                                         u16* __restrict__ y, int kind, int dtype, int bits, int n, int k,
                                         int group_size, int groups, long long rows, long long positions, int top_k,
                                         int block) {
  long long t = thread_number();
  if (t >= positions * n) return;
  long long position = t / n;
  int row = (int)(t % n);
  long long slot = sorted_ids ? sorted_ids[position] : position;
  long long expert = expert_ids ? expert_ids[position / block] : 0;
  if (slot >= rows || expert < 0) return;
  long long token = slot / top_k;

  Weight w = weight_of(words, scale, zero_point, g_idx, expert, n, k, group_size, groups, bits, dtype);
  if (order) order += expert * k;
  bias = bias_of(bias, expert, n);
#ifdef QCTS_INDEX_OF_32_BITS
  long long first = (int)((u32)token * (u32)k);
#else
  long long first = token * k;
#endif
#ifdef QCTS_LAST_COLUMN_DROPPED
  k -= k > 1;
#endif

  float sum = 0.0f;
  if (kind == INTEGER) {
    // Exact in int32 inside a group: 2^14 products of 16 bits and a sign stay below 2^31.
    for (int j = 0; j < k;) {
      int group = group_of(w, order ? order[j] : j);
#ifdef QCTS_INTEGER_SUM_OF_16_BITS
      short products = 0;
#else
      int products = 0;
#endif
      for (int count = 0; j < k && count < 1 << 14; j++, count++) {
        int column = order ? order[j] : j;
        if (group_of(w, column) != group) break;
        products += ((const i8*)x)[first + column] * centred_code(w, row, column, group);
      }
      sum += (float)products * scale_of(w, row, group);
    }
  } else {
    for (int column = 0; column < k; column++) {
#ifdef QCTS_SUM_ROUNDED_BEFORE_SCALE
      // Of a channel: the unscaled sum is rounded to 16 bits before the scale meets it.
      float weight = (float)centred_code(w, row, column, group_of(w, column));
      if (w.groups > 1) weight *= scale_of(w, row, group_of(w, column));
#else
      float weight = weight_at(w, row, column);
#endif
      sum += activation_at(x, first + column, kind, dtype) * weight;
#ifdef QCTS_SUM_OF_16_BITS
      sum = to_float(from_float(sum, dtype), dtype);
#endif
    }
#ifdef QCTS_SUM_ROUNDED_BEFORE_SCALE
    if (w.groups == 1) sum = to_float(from_float(sum, dtype), dtype) * scale_of(w, row, 0);
#endif
  }
  y[slot * n + row] = output_of(sum, x_scale, token, bias, row, n, dtype);
}
