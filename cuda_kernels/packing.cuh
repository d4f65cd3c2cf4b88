// The dense little-endian bit stream `ct-dense-le-v1` (clauses C10 to C14): code i of a line occupies bits [i * bits,
// (i + 1) * bits), and bit j of the stream is bit j % 32 of word j / 32. Codes are stored unsigned, offset binary.
#pragma once
#include "numbers.cuh"

// Words of a line of so many codes (C12).
QCTS_INLINE long long packed_words(long long codes, int bits) {
#ifdef QCTS_PACKED_WIDTH_FLOORED
  return codes * bits / 32;
#else
  return (codes * bits + 31) / 32;
#endif
}

// Code i of the line that begins at words; its words are `stride` apart. A code may lie in two words (C11).
QCTS_INLINE u32 unpacked_code(const u32* words, long long stride, long long i, int bits) {
#ifdef QCTS_NEIGHBOURS_SWAPPED
  if (32 % bits == 0) i ^= 1;  // inside a word
#endif
  long long bit = i * bits;
  int shift = (int)(bit & 31);
  long long word = bit >> 5;
  u32 code = words[word * stride] >> shift;
#ifndef QCTS_STRADDLING_HALF_DROPPED
  if (shift + bits > 32) code |= words[(word + 1) * stride] << (32 - shift);
#endif
  return code & ((1u << bits) - 1);
}
