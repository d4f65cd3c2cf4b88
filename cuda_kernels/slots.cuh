// Slots: one token and one of the experts that it was routed to; slot t * top_k + j is place j of token t.
#pragma once
#include "numbers.cuh"

// The expert that computes a slot, by its place among the experts that are present; -1 for none (C92). experts: how many
// ids there are, and how long the map is. An id beyond them is nobody's: it must not become an address.
QCTS_INLINE int local_expert(int id, const int* expert_map, int experts) {
#ifdef QCTS_MINUS_ONE_IS_LAST_EXPERT
  if (id < 0) id += experts;
#endif
  if (id < 0 || id >= experts) return -1;
#ifdef QCTS_EXPERT_MAP_IGNORED
  return id;
#else
  return expert_map ? expert_map[id] : id;
#endif
}
