// Block alignment: the slots of each expert in whole blocks, for kernels whose tiles hold rows of one expert (C77).
//
// The order is that of the slots, whatever the launch: no counter is shared, so that a layer answers the same bits each
// time. Slots are looked through in chunks; a thread owns one expert in one chunk, counts there, and places there later.
#include "slots.cuh"

// What a thread looks through: the slots from first to end, of one chunk, for those of one expert.
struct Share {
  int expert;
  long long first, end;
};

// Of the last threads of a grid first lies behind all slots.
QCTS_INLINE Share share_of(long long thread, long long slots, int experts, int chunk) {
  long long first = thread / experts * chunk, end = first + chunk;
  return {(int)(thread % experts), first, end < slots ? end : slots};
}

// Slots of no expert are dropped. counts: (chunks, E), the slots of each expert in each chunk.
extern "C" __global__ void align_count(const int* __restrict__ ids, const int* __restrict__ expert_map, long long slots,
                                       int experts, int chunk, int* __restrict__ counts) {
  long long t = thread_number();
  Share own = share_of(t, slots, experts, chunk);
  if (own.first >= slots) return;
  int count = 0;
  for (long long slot = own.first; slot < own.end; slot++) {
    count += local_expert(ids[slot], expert_map, experts) == own.expert;
  }
  counts[t] = count;
}

// One thread an expert. counts becomes, for each chunk, how many of the expert's slots lie in the chunks before it.
// totals: (E), all of them.
extern "C" __global__ void align_totals(int* __restrict__ counts, int* __restrict__ totals, int chunks, int experts) {
  int expert = (int)thread_number();
  if (expert >= experts) return;
  int total = 0;
  for (int c = 0; c < chunks; c++) {
    int count = counts[(long long)c * experts + expert];
    counts[(long long)c * experts + expert] = total;
    total += count;
  }
  totals[expert] = total;
}

// One thread an expert, and one for the end. starts: (E + 1), where the run of each expert begins, whole blocks each, and
// where the last one ends: each thread adds up what lies before it.
extern "C" __global__ void align_starts(const int* __restrict__ totals, int* __restrict__ starts,
                                        int* __restrict__ num_tokens_post_pad, int experts, int block_size) {
  int expert = (int)thread_number();
  if (expert > experts) return;
  int start = 0;
  for (int e = 0; e < expert; e++) {
#ifdef QCTS_RUNS_NOT_PADDED
    start += totals[e];
#else
    start += (totals[e] + block_size - 1) / block_size * block_size;
#endif
  }
  starts[expert] = start;
  if (expert == experts) num_tokens_post_pad[0] = start;
}

// One thread a block, of `blocks` that there is room for. expert_ids: (blocks), -1 beyond the last run. sorted_ids:
// (blocks * block_size), all of it the sentinel for now: the number of slots, which is nobody's.
extern "C" __global__ void align_fill(const int* __restrict__ starts, int* __restrict__ sorted_ids,
                                      int* __restrict__ expert_ids, long long slots, int experts, int block_size, int blocks) {
  int number = (int)thread_number();
  if (number >= blocks) return;
  int place = number * block_size;
  int owner = -1;
  if (place < starts[experts]) {
    // The last expert whose run begins at this place or before it: runs without slots are empty.
    int low = 0, high = experts;
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (starts[middle] <= place) low = middle;
      else high = middle;
    }
    owner = low;
  }
#ifdef QCTS_BLOCK_OF_NEXT_EXPERT
  if (owner >= 0) owner = (owner + 1) % experts;
#endif
  expert_ids[number] = owner;
#ifdef QCTS_PADDING_IS_SLOT_ZERO
  for (int i = 0; i < block_size; i++) sorted_ids[place + i] = 0;
#else
  for (int i = 0; i < block_size; i++) sorted_ids[place + i] = (int)slots;
#endif
}

// counts: (chunks, E), slots of the expert in the chunks before. Writes every slot that has an expert into sorted_ids.
extern "C" __global__ void align_place(const int* __restrict__ ids, const int* __restrict__ expert_map,
                                       const int* __restrict__ counts, const int* __restrict__ starts,
                                       int* __restrict__ sorted_ids, long long slots, int experts, int chunk) {
  long long t = thread_number();
  Share own = share_of(t, slots, experts, chunk);
  if (own.first >= slots) return;
#ifdef QCTS_LAST_SLOT_OF_CHUNK_LOST
  own.end--;
#endif
  int place = starts[own.expert] + counts[t];
  for (long long slot = own.first; slot < own.end; slot++) {
    if (local_expert(ids[slot], expert_map, experts) == own.expert) sorted_ids[place++] = (int)slot;
  }
}
