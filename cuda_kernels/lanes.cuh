// The lanes of `routing.cuh` where a warp works together: its threads.
#pragma once
#include "numbers.cuh"

#define LANES 32
#ifdef QCTS_ROUTING_REDUCES_HALF_A_WARP
#define FARTHEST_LANE (LANES / 4)
#else
#define FARTHEST_LANE (LANES / 2)
#endif

#define EVERY_LANE 0xffffffffu

QCTS_INLINE int lane_number() { return threadIdx.x % LANES; }

// What lanes wrote before is seen by all of them after.
QCTS_INLINE void meet_lanes() { __syncwarp(); }

// The value of the lane whose number differs in one bit.
QCTS_INLINE float from_lane(float value, int distance) { return __shfl_xor_sync(EVERY_LANE, value, distance); }

QCTS_INLINE int from_lane(int value, int distance) { return __shfl_xor_sync(EVERY_LANE, value, distance); }

// The same bits in every lane: additions commute.
QCTS_INLINE float sum_of_lanes(float value) {
  for (int distance = FARTHEST_LANE; distance > 0; distance /= 2) value += from_lane(value, distance);
  return value;
}
