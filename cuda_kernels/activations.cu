// Activation quantizers, one thread a segment.
#include "quantizer.cuh"

// x: (segments, length). codes: alike. scales: float32 (segments), left alone where a static scale is given.
// zero_points: int32 (segments) of an asymmetric format, or null.
extern "C" __global__ void quantize_plain(const u16* __restrict__ x, u8* __restrict__ codes, float* __restrict__ scales,
                                          int* __restrict__ zero_points, int dtype, int target, long long segments,
                                          long long length, float given) {
  long long t = thread_number();
  if (t >= segments) return;
  const u16* values = x + t * length;
#ifdef QCTS_AMAX_OF_NEXT_TOKEN
  const u16* measured = x + (t + 1) % segments * length;
#else
  const u16* measured = values;
#endif
#ifdef QCTS_AMAX_WITHOUT_TAIL
  long long end = length > 32 ? length / 32 * 32 : length;
#else
  long long end = length;
#endif
  // An asymmetric range is that of the values alone; zero need not lie in it (C66).
  float least = zero_points ? to_float(measured[0], dtype) : 0.0f, greatest = least;
  for (long long i = 0; i < end; i++) {
    float value = to_float(measured[i], dtype);
    least = lesser_of(least, value);
    greatest = greater_of(greatest, value);
  }
  Quantizer by = quantizer_of(least, greatest, target, zero_points != nullptr, given);
  for (long long i = 0; i < length; i++) codes[t * length + i] = code_of(to_float(values[i], dtype), by, target);
#ifdef QCTS_ACTIVATION_SCALE_IN_BF16
  by.scale = bf16_to_float(float_to_bf16(by.scale));
#endif
  if (!(given > 0.0f)) scales[t] = by.scale;
  if (zero_points) zero_points[t] = by.zero_point;
}
