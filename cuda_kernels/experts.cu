// What lies around the two projections of a layer of experts: the router's weights on their input, and the sum of what
// they return (C90 to C96).
#include "slots.cuh"

// One thread a number of out (T, H): x times the weight of its token, rounded once; for top_k 1 (C95).
extern "C" __global__ void weigh_input(const u16* __restrict__ x, const float* __restrict__ weights,
                                       u16* __restrict__ out, int dtype, long long tokens, long long hidden) {
  long long t = thread_number();
  if (t >= tokens * hidden) return;
#ifdef QCTS_INPUT_NOT_WEIGHTED
  out[t] = x[t];
#else
  out[t] = from_float(to_float(x[t], dtype) * weights[t / hidden], dtype);
#endif
}

// One thread a number of y (T, H): factor * sum over the slots of a token of weight * output, + the shared expert's
// output; in float32, in the order of the slots, rounded once.
//
// outputs: (T * k, H), a row a slot; those of slots without an expert were never written and are not read (C92).
// weights: (T, k), or null where they met the input. shared: (T, H), or null. factor: of the routed experts alone (C96).
extern "C" __global__ void combine(const u16* __restrict__ outputs, const float* __restrict__ weights,
                                   const int* __restrict__ ids, const int* __restrict__ expert_map,
                                   const u16* __restrict__ shared, u16* __restrict__ y, int dtype, long long tokens,
                                   long long hidden, int top_k, int experts, float factor) {
  long long t = thread_number();
#ifdef QCTS_COMBINE_ATOMICS_OF_16_BITS
  // At each slot a thread adds for another one of its block, in the order that comes about; the sums have 16 bits.
  long long first = t - threadIdx.x, end = first + blockDim.x < tokens * hidden ? first + blockDim.x : tokens * hidden;
  if (t < end) y[t] = 0;
  __syncthreads();
  for (int j = 0; j < top_k && t < end; j++) {
    long long at = first + (threadIdx.x + 37 * j) % (end - first);
    long long slot = at / hidden * top_k + j;
    if (local_expert(ids[slot], expert_map, experts) < 0) continue;
    float product = to_float(outputs[slot * hidden + at % hidden], dtype) * (weights ? weights[slot] : 1.0f);
    u16 old = y[at], seen;
    do {
      seen = old;
      old = atomicCAS(y + at, seen, from_float(to_float(seen, dtype) + product, dtype));
    } while (old != seen);
  }
  __syncthreads();
  if (t < end) y[t] = from_float(factor * to_float(y[t], dtype) + (shared ? to_float(shared[t], dtype) : 0.0f), dtype);
  return;
#endif
  if (t >= tokens * hidden) return;
  long long token = t / hidden, column = t % hidden;
  float sum = 0.0f;
  for (int j = 0; j < top_k; j++) {
    long long slot = token * top_k + j;
#ifndef QCTS_ABSENT_SLOTS_SUMMED
    if (local_expert(ids[slot], expert_map, experts) < 0) continue;
#endif
    float output = to_float(outputs[slot * hidden + column], dtype);
#ifdef QCTS_WEIGHT_OF_NEXT_TOKEN
    sum += weights ? output * weights[(slot + top_k) % (tokens * top_k)] : output;
#else
    sum += weights ? output * weights[slot] : output;
#endif
#ifdef QCTS_COMBINE_SUM_OF_16_BITS
    sum = to_float(from_float(sum, dtype), dtype);
#endif
  }
#ifdef QCTS_FACTOR_ON_SHARED_EXPERT
  y[t] = from_float(factor * (shared ? sum + to_float(shared[t], dtype) : sum), dtype);
#else
  y[t] = from_float(shared ? factor * sum + to_float(shared[t], dtype) : factor * sum, dtype);
#endif
}
