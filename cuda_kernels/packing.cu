// Packing and unpacking of codes along the last or the first dimension of a matrix, or of a stack of matrices (C10 to
// C15).
#include "packing.cuh"

// One thread a word. codes: i8 (stack, lines, length) along the last dimension or (stack, length, lines) along the
// first. words: (stack, lines, W) or (stack, W, lines). out_of_range counts codes outside the width (C15), on the
// host's behalf.
extern "C" __global__ void pack_codes(const i8* __restrict__ codes, u32* __restrict__ words,
                                      int* __restrict__ out_of_range, long long stack, long long lines,
                                      long long length, int bits, int along_first) {
  long long count = packed_words(length, bits);
  long long t = thread_number();
  if (t >= stack * lines * count) return;
  long long word = along_first ? t / lines % count : t % count;
  long long line = along_first ? t % lines : t / count % lines;
  long long matrix = t / (lines * count);
  const i8* first = codes + matrix * lines * length + (along_first ? line : line * length);
  long long stride = along_first ? lines : 1;

  int offset = 1 << (bits - 1);
  u32 packed = 0;
  // The codes that have a bit in this word: from the one that holds its lowest bit on.
  for (long long i = word * 32 / bits; i < length && i * bits < (word + 1) * 32; i++) {
    int code = first[i * stride];
    if (code < -offset || code >= offset) *out_of_range = 1;
#ifdef QCTS_PACKED_WITHOUT_OFFSET
    u32 field = (u32)code & ((1u << bits) - 1);
#else
    u32 field = (u32)(code + offset) & ((1u << bits) - 1);
#endif
    long long shift = i * bits - word * 32;  // negative where the code began in the word before
    packed |= shift < 0 ? field >> -shift : field << shift;
  }
  words[t] = packed;
}

// One thread a code; shapes as above.
extern "C" __global__ void unpack_codes(const u32* __restrict__ words, i8* __restrict__ codes, long long stack,
                                        long long lines, long long length, int bits, int along_first) {
  long long t = thread_number();
  if (t >= stack * lines * length) return;
  long long i = along_first ? t / lines % length : t % length;
  long long line = along_first ? t % lines : t / length % lines;
  long long matrix = t / (lines * length);
  long long count = packed_words(length, bits);
  const u32* first = words + matrix * lines * count + (along_first ? line : line * count);
  codes[t] = (i8)((int)unpacked_code(first, along_first ? lines : 1, i, bits) - (1 << (bits - 1)));
}
