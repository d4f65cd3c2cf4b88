// Activation quantizers, one block a segment: the range of its values is reduced over the block.
#include "quantizer.cuh"

// The greatest of the values of a block; every thread gets it. shared: one number a warp.
QCTS_INLINE float greatest_of_block(float value, float* shared) {
  for (int offset = 16; offset > 0; offset /= 2) value = greater_of(value, __shfl_xor_sync(0xffffffff, value, offset));
#ifdef QCTS_AMAX_OF_ONE_WARP
  return value;
#endif
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < (int)blockDim.x / 32; warp++) value = greater_of(value, shared[warp]);
  __syncthreads();
  return value;
}

// As quantize_plain; a block a segment, whole warps of threads.
extern "C" __global__ void __launch_bounds__(256)
    quantize_block(const u16* __restrict__ x, u8* __restrict__ codes, float* __restrict__ scales,
                   int* __restrict__ zero_points, int dtype, int target, long long segments, long long length,
                   float given) {
  __shared__ float shared[8];
  long long segment = blockIdx.x;
  const u16* values = x + segment * length;
  float least = zero_points ? to_float(values[0], dtype) : 0.0f, greatest = least;
  for (long long i = threadIdx.x; i < length; i += blockDim.x) {
    float value = to_float(values[i], dtype);
    least = lesser_of(least, value);
    greatest = greater_of(greatest, value);
  }
  greatest = greatest_of_block(greatest, shared);
  least = -greatest_of_block(-least, shared);
  Quantizer by = quantizer_of(least, greatest, target, zero_points != nullptr, given);
  for (long long i = threadIdx.x; i < length; i += blockDim.x) {
    codes[segment * length + i] = code_of(to_float(values[i], dtype), by, target);
  }
  if (threadIdx.x == 0) {
    if (!(given > 0.0f)) scales[segment] = by.scale;
    if (zero_points) zero_points[segment] = by.zero_point;
  }
}
