// The router of `routing.cuh`, a warp a token: what a GPU uses.
#include "lanes.cuh"
#include "routing.cuh"

extern "C" __global__ void route_by_warps(const void* __restrict__ logits, int dtype, const float* __restrict__ bias,
                                          long long tokens, int experts, int top_k, int scoring, int normalized,
                                          int groups, int top_groups, int pair, float scaling,
                                          float* __restrict__ scores, float* __restrict__ keys,
                                          float* __restrict__ group_keys, float* __restrict__ weights,
                                          int* __restrict__ ids) {
  long long token = thread_number() / LANES;
  if (token >= tokens) return;
  Routing how = {experts, top_k, scoring, normalized, groups, top_groups, pair, scaling};
  route_token(token, logits, dtype, bias, how, scores, keys, group_keys, weights, ids);
}
