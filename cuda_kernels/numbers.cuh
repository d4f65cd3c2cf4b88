// Number formats and their conversions, for NVRTC, nvcc and g++ alike: no header of CUDA or C++ is included.
//
// 16-bit activations and outputs travel as u16 with a dtype argument, BF16 or FP16. Conversions round to nearest, ties
// to even, with subnormals; e4m3 saturates at 448 (OCP, no infinity).
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define QCTS_INLINE static __device__ __forceinline__
#else
// A kernel whose threads do not cooperate is a function: the host runs it once a thread, one thread after the other.
#define __global__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define QCTS_INLINE static inline
struct HostIndex {
  u32 x, y, z;
};
static HostIndex blockIdx, threadIdx, blockDim, gridDim;
extern "C" {
float rintf(float);
float fabsf(float);
float fmaxf(float, float);
float fminf(float, float);
float expf(float);
float tanhf(float);
float erff(float);
}
#endif

#define BF16 0
#define FP16 1

// The number of this thread among all of a one-dimensional launch.
QCTS_INLINE long long thread_number() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }

#ifdef __CUDACC__
QCTS_INLINE u32 bits_of(float value) { return __float_as_uint(value); }
QCTS_INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
#else
QCTS_INLINE u32 bits_of(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

QCTS_INLINE float float_of(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
#endif

QCTS_INLINE bool is_nan(float value) { return value != value; }

// ---- bf16

QCTS_INLINE float bf16_to_float(u16 bits) { return float_of((u32)bits << 16); }

QCTS_INLINE u16 float_to_bf16(float value) {
#ifdef __CUDA_ARCH__
  u16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  if (is_nan(value)) return 0x7fff;
  u32 bits = bits_of(value);
  return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}

// ---- fp16

QCTS_INLINE float fp16_to_float(u16 half) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(half));
  return result;
#else
  u32 sign = (u32)(half & 0x8000) << 16;
  u32 magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // The exponent's bias is 15 in fp16 and 127 in fp32; a multiplication makes subnormals right as well.
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
#endif
}

QCTS_INLINE u16 float_to_fp16(float value) {
#ifdef __CUDA_ARCH__
  u16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  u16 sign = (u16)(bits_of(value) >> 16 & 0x8000);
  u32 bits = bits_of(value) & 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits >= bits_of(65520.0f)) return sign | 0x7c00;
  if (bits < bits_of(0x1p-14f)) return sign | (u16)rintf(float_of(bits) * 0x1p24f);  // subnormal
  return sign | (u16)((bits + 0xfff + ((bits >> 13) & 1) - (112u << 23)) >> 13);
#endif
}

// ---- either

QCTS_INLINE float to_float(u16 bits, int dtype) { return dtype == BF16 ? bf16_to_float(bits) : fp16_to_float(bits); }

QCTS_INLINE u16 from_float(float value, int dtype) {
  return dtype == BF16 ? float_to_bf16(value) : float_to_fp16(value);
}

// ---- e4m3

QCTS_INLINE float e4m3_to_float(u8 code) {
  if ((code & 0x7f) == 0x7f) return float_of(0x7fc00000);
  // Shifted to where fp16 has its exponent and mantissa, it is an fp16 number, a factor of 2^8 too small.
  return fp16_to_float((u16)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

QCTS_INLINE u8 float_to_e4m3(float value) {
  u8 sign = (u8)(bits_of(value) >> 24 & 0x80);
  u32 bits = bits_of(value) & 0x7fffffff;
  if (bits > 0x7f800000) return 0x7f;
  if (bits >= bits_of(448.0f)) return sign | 0x7e;
  if (bits < bits_of(0x1p-6f)) return sign | (u8)rintf(float_of(bits) * 0x1p9f);  // subnormal
  return sign | (u8)((bits + 0x7ffff + ((bits >> 20) & 1) - (120u << 23)) >> 20);
}
