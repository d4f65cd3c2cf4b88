// Kernels that misbehave on purpose, for tests of isolation. No part of any build of the others.
#include "numbers.cuh"

#ifdef __CUDACC__
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, unsigned long);
#endif

// A store to an address that nothing is mapped to: that of a null pointer's 16th member.
extern "C" __global__ void crash_illegal_address(int* __restrict__ out) {
  if (out) ((volatile int*)nullptr)[16] = 1;
}

// A load of four bytes from an odd address.
extern "C" __global__ void crash_misaligned_address(int* __restrict__ out) {
  out[0] = *(volatile int*)((char*)out + 1);
}

// What assert() does when it fails.
extern "C" __global__ void crash_assert(int* __restrict__ out) {
  if (out) __assertfail("false", "crashes.cu", 1, "crash_assert", 1);
}

extern "C" __global__ void crash_trap(int* __restrict__ out) {
  if (out) asm volatile("trap;");
}

// Steps that depend on each other, more than ten nanoseconds each: 2^34 of them last for minutes.
extern "C" __global__ void crash_endless(int* __restrict__ out, long long steps) {
  u32 state = 1;
  for (long long i = 0; i < steps; i++) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
  }
  out[0] = (int)state;
}
