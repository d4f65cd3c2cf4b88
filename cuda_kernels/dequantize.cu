// The weight itself: (u - u_z) * s, rounded once to the scale's dtype (C27).
#include "weights.cuh"

// One thread a number of out (n, k); arguments as in weights.cuh.
extern "C" __global__ void dequantize(const u32* __restrict__ words, const u16* __restrict__ scale,
                                      const u32* __restrict__ zero_point, const int* __restrict__ g_idx,
                                      u16* __restrict__ out, int dtype, int bits, int n, int k, int group_size,
                                      int groups) {
  long long t = thread_number();
  if (t >= (long long)n * k) return;
  Weight w = weight_of(words, scale, zero_point, g_idx, 0, n, k, group_size, groups, bits, dtype);
  int row = (int)(t / k), column = (int)(t % k);
#ifdef QCTS_ZERO_POINT_NOT_SCALED
  // code * scale - zero point
  int group = group_of(w, column), zero = zero_of(w, row, group);
  int code = centred_code(w, row, column, group) + zero;
  out[t] = from_float((float)code * scale_of(w, row, group) - (float)zero, dtype);
#else
  out[t] = from_float(weight_at(w, row, column), dtype);
#endif
}
