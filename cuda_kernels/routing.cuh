// A router: from the logits of a token to the experts that it meets and their weights (C70 to C76). All of it in float32.
//
// A token belongs to so many lanes, one thread or the threads of a warp (`lane.cuh` or `lanes.cuh`, included before this).
// A lane looks at every LANES-th expert; what all of them have to know is the same number in each.
#pragma once
#include "numbers.cuh"

#define FP32 2

#define SOFTMAX 0
#define SIGMOID 1

#define LARGEST_FLOAT 0x1.fffffep127f

// Of finite keys none is smaller: what is not eligible comes last.
#define MASKED (-LARGEST_FLOAT)

// normalized: whether weights are divided by their sum. pair: whether a group's score is the sum of its two largest keys.
struct Routing {
  int experts, top_k, scoring, normalized, groups, top_groups, pair;
  float scaling;
};

// One of several keys, and its place among them; place -1: none.
struct Choice {
  float key;
  int place;
};

QCTS_INLINE float logit_at(const void* logits, int dtype, long long i) {
  return dtype == FP32 ? ((const float*)logits)[i] : to_float(((const u16*)logits)[i], dtype);
}

QCTS_INLINE bool is_finite(float value) { return fabsf(value) <= LARGEST_FLOAT; }

// ---- selection

// Whether a is chosen before b: the larger key, of equal keys the lower place (C71).
QCTS_INLINE bool comes_before(Choice a, Choice b) {
  if (a.place < 0 || b.place < 0) return a.place >= 0;
#ifdef QCTS_TIES_TO_HIGHEST_INDEX
  return a.key > b.key || (a.key == b.key && a.place > b.place);
#else
  return a.key > b.key || (a.key == b.key && a.place < b.place);
#endif
}

// What is chosen right after `previous`, or first of all where that is none. Each choice is found from the one before, so
// that nothing has to be marked as taken.
QCTS_INLINE Choice next_choice(const float* keys, int count, Choice previous) {
  Choice best = {0.0f, -1};
  for (int i = lane_number(); i < count; i += LANES) {
    Choice other = {keys[i], i};
    bool left = previous.place < 0 || comes_before(previous, other);
    if (left && comes_before(other, best)) best = other;
  }
  for (int distance = FARTHEST_LANE; distance > 0; distance /= 2) {
    Choice other = {from_lane(best.key, distance), from_lane(best.place, distance)};
    if (comes_before(other, best)) best = other;
  }
  return best;
}

QCTS_INLINE Choice first_choice(const float* keys, int count) { return next_choice(keys, count, Choice{0.0f, -1}); }

// ---- scores

// 1 / (1 + exp(-l)). That of NaN counts as 0 (C76); infinities have 0 and 1 of themselves.
QCTS_INLINE void sigmoid_scores(const void* logits, int dtype, long long first, int experts, float* scores) {
  for (int e = lane_number(); e < experts; e += LANES) {
    float score = 1.0f / (1.0f + expf(-logit_at(logits, dtype, first + e)));
#ifndef QCTS_NAN_SCORE_KEPT
    if (is_nan(score)) score = 0.0f;
#endif
    scores[e] = score;
  }
}

// exp(l - max) / sum. A token with a NaN or +infinity among its logits, or nothing but -infinity, has no score at all (C76).
QCTS_INLINE void softmax_scores(const void* logits, int dtype, long long first, int experts, float* scores) {
  float largest = -LARGEST_FLOAT, broken = 0.0f, finite = 0.0f;
  for (int e = lane_number(); e < experts; e += LANES) {
    float logit = logit_at(logits, dtype, first + e);
    broken += is_nan(logit) || logit > LARGEST_FLOAT;
    finite += is_finite(logit);
    if (logit > largest) largest = logit;
  }
  for (int distance = FARTHEST_LANE; distance > 0; distance /= 2) largest = fmaxf(largest, from_lane(largest, distance));
#ifdef QCTS_SOFTMAX_WITHOUT_MAXIMUM
  largest = 0.0f;
#endif
  bool scored = sum_of_lanes(broken) == 0.0f && sum_of_lanes(finite) > 0.0f;
#ifdef QCTS_NAN_SCORE_KEPT
  scored = true;
#endif
  float sum = 0.0f;
  for (int e = lane_number(); e < experts; e += LANES) {
    scores[e] = scored ? expf(logit_at(logits, dtype, first + e) - largest) : 0.0f;
    sum += scores[e];
  }
  sum = sum_of_lanes(sum);
  for (int e = lane_number(); e < experts && scored; e += LANES) scores[e] = scores[e] / sum;
}

// ---- groups

// The largest key of a group, or the sum of its two largest (C75).
QCTS_INLINE float group_key(const float* keys, int size, bool pair) {
  Choice first = first_choice(keys, size);
#ifdef QCTS_GROUP_SCORE_IS_MAX
  pair = false;
#endif
  return pair ? first.key + next_choice(keys, size, first).key : first.key;
}

// Leave only the members of the best groups eligible (C75). group_keys: room for one number a group.
QCTS_INLINE void mask_groups(float* keys, float* group_keys, Routing how) {
  int size = how.experts / how.groups;
  meet_lanes();
  for (int g = 0; g < how.groups; g++) {
    float key = group_key(keys + g * size, size, how.pair != 0);
    if (g % LANES == lane_number()) group_keys[g] = key;
  }
  meet_lanes();
  Choice last = first_choice(group_keys, how.groups);
  for (int i = 1; i < how.top_groups; i++) last = next_choice(group_keys, how.groups, last);
  for (int e = lane_number(); e < how.experts; e += LANES) {
    Choice group = {group_keys[e / size], e / size};
#ifdef QCTS_MASKED_KEYS_ARE_ZERO
    if (comes_before(last, group)) keys[e] = 0.0f;
#else
    if (comes_before(last, group)) keys[e] = MASKED;
#endif
  }
}

// ---- one token

// logits: (T, E) of a dtype. bias: float (E), or null. scores, keys (T, E) and group_keys (T, groups): room to work in.
// weights, ids: (T, k).
QCTS_INLINE void route_token(long long token, const void* logits, int dtype, const float* bias, Routing how,
                             float* scores, float* keys, float* group_keys, float* weights, int* ids) {
  int experts = how.experts;
  scores += token * experts;
  keys += token * experts;
  weights += token * how.top_k;
  ids += token * how.top_k;

  if (how.scoring == SIGMOID) {
    sigmoid_scores(logits, dtype, token * experts, experts, scores);
  } else {
    softmax_scores(logits, dtype, token * experts, experts, scores);
  }

  // The bias decides the selection and enters no weight (C74).
  for (int e = lane_number(); e < experts; e += LANES) {
    float key = bias ? scores[e] + bias[e] : scores[e];
    keys[e] = is_finite(key) ? key : MASKED;  // keys have an order, whatever the bias holds
  }
  if (how.groups > 1) mask_groups(keys, group_keys + token * how.groups, how);
  meet_lanes();

  Choice chosen = {0.0f, -1};
  float sum = 0.0f;
  for (int j = 0; j < how.top_k; j++) {
    chosen = next_choice(keys, experts, chosen);
#ifdef QCTS_BIAS_KEPT_IN_WEIGHT
    float score = keys[chosen.place];
#else
    float score = scores[chosen.place];
#endif
    sum += score;
    if (lane_number() == 0) {
      ids[j] = chosen.place;
      weights[j] = score;
    }
  }

#ifdef QCTS_WEIGHTS_NOT_RENORMALIZED
  how.normalized = 0;
#endif
  float divisor = how.normalized && sum > 0.0f ? sum : 1.0f;
  for (int j = 0; j < how.top_k && lane_number() == 0; j++) {
    weights[j] = weights[j] / divisor;
#ifndef QCTS_ROUTED_SCALING_DROPPED
    weights[j] *= how.scaling;
#endif
  }
}
