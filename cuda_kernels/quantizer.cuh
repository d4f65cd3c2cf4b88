// Activation quantizers of the `kernel` convention (C61 to C66): the scale is amax / Q in float32, the code x / scale.
//
// Tokens, groups of columns and whole tensors are all the same here: segments of x, each with a scale of its own.
#pragma once
#include "numbers.cuh"

// What codes are made; also how they are stored: i8, i8 and e4m3.
#define TO_INT8 0
#define TO_INT4 1
#define TO_E4M3 2

struct Quantizer {
  float scale;
  int zero_point;
};

// The greater and the lesser of two numbers; NaN if one is. fmaxf and fminf drop it, and the answer would be finite.
QCTS_INLINE float greater_of(float a, float b) { return a > b || is_nan(a) ? a : b; }
QCTS_INLINE float lesser_of(float a, float b) { return a < b || is_nan(a) ? a : b; }

// From the least and the greatest value of a segment; where they are NaN, so is the scale. given: the scale of a static
// format, or 0.
QCTS_INLINE Quantizer quantizer_of(float least, float greatest, int target, int asymmetric, float given) {
  if (given > 0.0f) return {given, 0};
  if (asymmetric) {
    float scale = (greatest - least) / 255.0f;
    return {scale, (int)rintf(-128.0f - (scale > 0.0f ? least / scale : 0.0f))};
  }
#ifdef QCTS_AMAX_WITHOUT_ABS
  float amax = greatest;
#else
  float amax = greater_of(-least, greatest);
#endif
#ifdef QCTS_INT8_INSTEAD_OF_INT4
  if (target == TO_INT4) target = TO_INT8;
#endif
#ifdef QCTS_OTHER_CONVENTION
  return {amax / (target == TO_E4M3 ? 448.0f : target == TO_INT8 ? 127.5f : 7.5f), 0};
#else
  return {amax / (target == TO_E4M3 ? 448.0f : target == TO_INT8 ? 127.0f : 7.0f), 0};
#endif
}

// The code of one value, as stored. A segment of zeros has the scale 0, and codes that mean zero (C64).
QCTS_INLINE u8 code_of(float value, Quantizer by, int target) {
#ifdef QCTS_ZERO_DIVIDED_BY_ZERO
  float quotient = value / by.scale;
#else
  float quotient = by.scale > 0.0f ? value / by.scale : 0.0f;
#endif
  if (target == TO_E4M3) {
#ifdef QCTS_E4M3_TRUNCATED
    float clamped = fmaxf(-448.0f, fminf(448.0f, quotient));
    if (fabsf(clamped) >= 0x1p-6f) return float_to_e4m3(float_of(bits_of(clamped) & 0xfff00000));
#endif
    return float_to_e4m3(quotient);
  }
#ifdef QCTS_ROUNDED_HALF_AWAY
  float code = quotient < 0.0f ? (float)(int)(quotient - 0.5f) : (float)(int)(quotient + 0.5f);
#else
  float code = rintf(quotient);
#endif
  code += (float)by.zero_point;
#ifdef QCTS_INT8_INSTEAD_OF_INT4
  if (target == TO_INT4) target = TO_INT8;
#endif
  float low = target == TO_INT4 ? -8.0f : -128.0f, high = target == TO_INT4 ? 7.0f : 127.0f;
#ifdef QCTS_CLAMP_ONE_SHORT
  low += 1.0f, high -= 1.0f;
#endif
  return (u8)(i8)fmaxf(low, fminf(high, code));
}
