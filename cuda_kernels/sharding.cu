// What a rank of a divided layer of experts holds, cut out of what the whole layer holds (C100 to C104).
#include "numbers.cuh"

// One thread a byte. source: (outer, size, inner) bytes. taken: (outer, count, inner), from `first` of the middle dimension.
extern "C" __global__ void take_range(const void* __restrict__ source, void* __restrict__ taken, long long outer,
                                      long long size, long long inner, long long first, long long count) {
  long long t = thread_number();
  if (t >= outer * count * inner) return;
  long long run = t / inner, line = run / count;
#ifdef QCTS_RANGE_OF_FIRST_RANK
  first = 0;
#endif
  long long place = first + run % count, within = t % inner;
  ((u8*)taken)[t] = ((const u8*)source)[(line * size + place) * inner + within];
}

// One thread an expert. places: (E), the place of each global expert among the `count` from `first` on, -1 for the others.
extern "C" __global__ void place_experts(int* __restrict__ places, int experts, int first, int count) {
  int expert = (int)thread_number();
  if (expert >= experts) return;
  bool held = expert >= first && expert < first + count;
#ifdef QCTS_EXPERT_MAP_OF_GLOBAL_PLACES
  places[expert] = held ? expert : -1;
#else
  places[expert] = held ? expert - first : -1;
#endif
}
