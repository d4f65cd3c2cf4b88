// A packed weight and what its codes stand for: (u - u_z) * s with the scale and the zero point of the column's group
// (C2, C3).
#pragma once
#include "packing.cuh"

// What activations are: numbers of 16 bits, integer codes (int8, and int4 stored as int8), or e4m3 codes.
#define A16 0
#define INTEGER 1
#define FP8 2

// One matrix (n, k). words: (n, packed_words(k)). scale: (n, groups) of 16 bits. zero_point: packed along n,
// (packed_words(n), groups), or null. g_idx: (k), the group of each column, or null.
struct Weight {
  const u32* words;
  const u16* scale;
  const u32* zero_point;
  const int* g_idx;
  int n, k, group_size, groups, bits, dtype;
};

// Matrix number `expert` of a stack whose matrices lie one after the other. groups: of a row; with g_idx they may be
// more than k / group_size, where a rank holds the scales of all groups and some of the columns (C102).
QCTS_INLINE Weight weight_of(const u32* words, const u16* scale, const u32* zero_point, const int* g_idx,
                             long long expert, int n, int k, int group_size, int groups, int bits, int dtype) {
  long long scaled_by = expert;
#ifdef QCTS_SCALE_OF_EXPERT_BEFORE
  if (scaled_by > 0) scaled_by--;
#endif
  return {words + expert * n * packed_words(k, bits),
          scale + scaled_by * n * groups,
          zero_point ? zero_point + expert * packed_words(n, bits) * groups : zero_point,
          g_idx ? g_idx + expert * k : g_idx,
          n, k, group_size, groups, bits, dtype};
}

QCTS_INLINE int group_of(const Weight& w, int column) {
#ifdef QCTS_G_IDX_IGNORED
  return column / w.group_size;
#elif defined(QCTS_GROUPS_ONE_COLUMN_EARLY)
  return w.g_idx ? w.g_idx[column] : (column + 1 < w.k ? column + 1 : column) / w.group_size;
#else
  return w.g_idx ? w.g_idx[column] : column / w.group_size;
#endif
}

// The stored code that means zero.
QCTS_INLINE int zero_of(const Weight& w, int row, int group) {
  if (!w.zero_point) return 1 << (w.bits - 1);
#if defined(QCTS_ZERO_POINT_PLUS_ONE)
  return (int)unpacked_code(w.zero_point + group, w.groups, row, w.bits) + 1;
#elif defined(QCTS_ZERO_POINT_OF_GROUP_0)
  return (int)unpacked_code(w.zero_point, w.groups, row, w.bits);
#elif defined(QCTS_ZERO_POINT_OF_NEXT_ROW)
  return (int)unpacked_code(w.zero_point + group, w.groups, row + 1 < w.n ? row + 1 : row, w.bits);
#else
  return (int)unpacked_code(w.zero_point + group, w.groups, row, w.bits);
#endif
}

QCTS_INLINE float scale_of(const Weight& w, int row, int group) {
#ifdef QCTS_SCALE_OF_NEXT_GROUP
  group = group + 1 < w.groups ? group + 1 : group;
#endif
  return to_float(w.scale[(long long)row * w.groups + group], w.dtype);
}

// u - u_z: at most 8 bits and a sign.
QCTS_INLINE int centred_code(const Weight& w, int row, int column, int group) {
  int code = (int)unpacked_code(w.words + row * packed_words(w.k, w.bits), 1, column, w.bits);
#ifdef QCTS_TWOS_COMPLEMENT
  code ^= 1 << (w.bits - 1);
#endif
  return code - zero_of(w, row, group);
}

// A code less its zero point as float32, exactly, where 2^23 has been added to the zero point. Set below the exponent of
// 2^23 a code is that much above 2^23.
QCTS_INLINE float less_offset(u32 code, float offset) { return float_of(0x4b000000 | code) - offset; }

QCTS_INLINE float offset_of(const Weight& w, int row, int group) { return 8388608.0f + (float)zero_of(w, row, group); }

// (u - u_z) * s in float32: exact, that has 8 bits and a scale of 16 bits has 11.
QCTS_INLINE float weight_at(const Weight& w, int row, int column) {
  int group = group_of(w, column);
  return (float)centred_code(w, row, column, group) * scale_of(w, row, group);
}

// ---- activations and outputs, the same for every kernel of a linear

QCTS_INLINE float activation_at(const void* x, long long i, int kind, int dtype) {
  if (kind == INTEGER) return (float)((const i8*)x)[i];
  if (kind == FP8) return e4m3_to_float(((const u8*)x)[i]);
  return to_float(((const u16*)x)[i], dtype);
}

// The bias of a matrix of a stack, or null.
QCTS_INLINE const u16* bias_of(const u16* bias, long long expert, int n) {
#ifdef QCTS_BIAS_OF_EXPERT_BEFORE
  if (expert > 0) expert--;
#endif
  return bias ? bias + expert * n : bias;
}

// sum * x_scale + bias in float32, rounded once (C41).
QCTS_INLINE u16 output_of(float sum, const float* x_scale, long long token, const u16* bias, int row, int n,
                          int dtype) {
#ifdef QCTS_ACTIVATION_SCALE_OF_TOKEN_BEFORE
  if (token > 0) token--;
#endif
#ifndef QCTS_ACTIVATION_SCALE_DROPPED
  if (x_scale) sum *= x_scale[token];
#endif
#ifdef QCTS_BIAS_DROPPED_IN_LAST_TILE
  if (row / 32 == (n - 1) / 32) bias = nullptr;
#endif
#ifdef QCTS_BIAS_AFTER_ROUNDING
  if (bias) sum = to_float(from_float(sum, dtype), dtype);
#endif
  if (bias) sum += to_float(bias[row], dtype);
#ifdef QCTS_OUTPUT_TRUNCATED
  // Cut off what the format does not hold, instead of rounding to nearest.
  return from_float(float_of(bits_of(sum) & (dtype == BF16 ? 0xffff0000 : 0xffffe000)), dtype);
#else
  return from_float(sum, dtype);
#endif
}
