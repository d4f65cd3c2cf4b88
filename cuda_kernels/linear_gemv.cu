// Weights of any width and activations of 16 bits, at most 4 tokens: each word is read once, 16 bytes at a time.
//
// A lane takes 128 codes of a row, which are `bits` loads of 16 bytes, and decodes them 32 at a time: 32 codes are
// `bits` words whatever the width, so every shift is known at compile time.
#include "weights.cuh"

#define CHUNK 128             // codes of a lane
#define LANES 16              // of a row
#define ROWS 16               // of a block
#define SLAB (CHUNK * LANES)  // columns a step of a block
#define PITCH (CHUNK + 4)     // of a chunk in shared memory: lanes read 16 bytes each, from other banks

QCTS_INLINE uint4 streamed(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Code i of 32 in words[0 .. BITS - 1], less the zero point.
template <int BITS>
QCTS_INLINE float centred(const u32* words, int i, float offset) {
  int word = i * BITS / 32, shift = i * BITS % 32;
  u32 code = words[word] >> shift;
  if (shift + BITS > 32) code = __funnelshift_r(words[word], words[word + 1], shift);
  return less_offset(code & ((1u << BITS) - 1), offset);
}

template <int BITS, int TOKENS>
QCTS_INLINE void project(const u16* x, const Weight& w, const u16* bias, u16* y, int tokens, float* shared) {
  int part = threadIdx.x % LANES;
  int row = blockIdx.x * ROWS + threadIdx.x / LANES;
  int read = row < w.n ? row : w.n - 1;
  const u32* line = w.words + read * packed_words(w.k, BITS);

  float sums[TOKENS] = {};
  for (int slab = 0; slab < w.k; slab += SLAB) {
    int column = slab + part * CHUNK;  // the lane's first
    bool inside = column < w.k;        // k is a multiple of CHUNK
    u32 words[4 * BITS];
    if (inside) {
      for (int i = 0; i < BITS; i++) {
        uint4 v = streamed((const uint4*)line + column / CHUNK * BITS + i);
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
      }
    }

    // The slab of x as float32, (TOKENS, LANES, PITCH).
    __syncthreads();
    for (int i = threadIdx.x; i < SLAB * TOKENS; i += blockDim.x) {
      int token = i / SLAB, here = i % SLAB;
      bool there = token < tokens && slab + here < w.k;
      shared[(token * LANES + here / CHUNK) * PITCH + here % CHUNK] =
          there ? to_float(x[(long long)token * w.k + slab + here], w.dtype) : 0.0f;
    }
    __syncthreads();

    if (!inside) continue;
#pragma unroll 1
    for (int quarter = 0; quarter < CHUNK / 32; quarter++) {
      int group = (column + 32 * quarter) / w.group_size;
      float scale = scale_of(w, read, group), offset = offset_of(w, read, group);
      float products[TOKENS] = {};
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        float codes[4];
        for (int j = 0; j < 4; j++) codes[j] = centred<BITS>(words, i + j, offset);
        for (int token = 0; token < TOKENS; token++) {
          float4 v = *(const float4*)(shared + (token * LANES + part) * PITCH + 32 * quarter + i);
          products[token] += v.x * codes[0] + v.y * codes[1] + v.z * codes[2] + v.w * codes[3];
        }
      }
      for (int token = 0; token < TOKENS; token++) sums[token] += products[token] * scale;
      // The next 32 codes move to where these were: registers have no index at run time.
      for (int i = 0; i < 3 * BITS; i++) words[i] = words[i + BITS];
    }
  }

  for (int token = 0; token < TOKENS; token++) {
    float sum = sums[token];
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (part == 0 && row < w.n && token < tokens) {
      y[(long long)token * w.n + row] = output_of(sum, nullptr, token, bias, row, w.n, w.dtype);
    }
  }
}

template <int BITS>
QCTS_INLINE void project(const u16* x, const Weight& w, const u16* bias, u16* y, int tokens, float* shared) {
  if (tokens == 1) project<BITS, 1>(x, w, bias, y, tokens, shared);
  else project<BITS, 4>(x, w, bias, y, tokens, shared);
}

// As project_mma4, for 2 to 8 bits, groups that are multiples of 32 and at most 4 tokens; k is a multiple of 128.
// Grid: n / 16 rounded up, 256 threads.
extern "C" __global__ void __launch_bounds__(256, 2)
    project_gemv(const u16* __restrict__ x, const u32* __restrict__ words, const u16* __restrict__ scale,
                 const u32* __restrict__ zero_point, const u16* __restrict__ bias, u16* __restrict__ y, int dtype,
                 int bits, int tokens, int n, int k, int group_size) {
  __shared__ __align__(16) float shared[4 * LANES * PITCH];  // read as float4
  Weight w = weight_of(words, scale, zero_point, nullptr, 0, n, k, group_size, k / group_size, bits, dtype);
  switch (bits) {
    case 2: project<2>(x, w, bias, y, tokens, shared); break;
    case 3: project<3>(x, w, bias, y, tokens, shared); break;
    case 4: project<4>(x, w, bias, y, tokens, shared); break;
    case 5: project<5>(x, w, bias, y, tokens, shared); break;
    case 6: project<6>(x, w, bias, y, tokens, shared); break;
    case 7: project<7>(x, w, bias, y, tokens, shared); break;
    case 8: project<8>(x, w, bias, y, tokens, shared); break;
  }
}
