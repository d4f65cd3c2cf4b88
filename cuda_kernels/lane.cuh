// The lanes of `routing.cuh` where a thread works alone: one.
#pragma once
#include "numbers.cuh"

#define LANES 1
#define FARTHEST_LANE 0  // how far apart the first two lanes are that tell each other what they know

QCTS_INLINE int lane_number() { return 0; }

QCTS_INLINE void meet_lanes() {}

QCTS_INLINE float sum_of_lanes(float value) { return value; }

QCTS_INLINE float from_lane(float value, int distance) { return value; }

QCTS_INLINE int from_lane(int value, int distance) { return value; }
