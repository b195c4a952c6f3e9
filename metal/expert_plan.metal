// expert_plan: sorts the pairs (row, choice) of a mixture of experts by expert, and cuts each expert's
// pairs into tiles of at most TILE.  One threadgroup.
//
//   indices    (pairs,)                 the expert of pair p, which is choice p % top_k of row p / top_k
//   num_live   (1,) int                 rows that are no padding: the first ones
//   plan       (pairs + 2 tiles,) int   first `order`: pairs by expert, of one expert by number;
//                                       then of each tile (first, count): it has the pairs
//                                       order[first] .. order[first + count - 1], all of one expert.
//                                       count 0: there is no such tile; -count: pairs of padding
//
// Layout.  Pairs pass through threadgroup memory, PART at a time, once to be counted and once to be
// placed.  A thread has some experts:
//
//   indices    5 2 5 0 2 5     thread 5:  3 pairs are of expert 5, 3 of smaller ones
//                              so its pairs go to order[3], order[4], order[5]
//   order      3 1 4 0 2 5
//   tiles      (0, 1) (1, 2) (3, 3)
//
// Padding.  Pairs of padding rows have the number EXPERTS, which no expert has.  So they are last in the
// order, and no expert is read for them.
//
// Why it is correct.  A thread's output depends on experts and counts only, which no thread changes
// between the barriers, and the places of two experts do not meet.  So the plan is the same in every
// order of threads.  The number of tiles is known on the device only: the array has room for the most
// that there can be, `room`, and the places behind the last tile are marked.
//
// Cost.  One launch; a thread reads 2 pairs + EXPERTS words of threadgroup memory for each expert.

// Copies the experts of at most PART pairs, from pair `first` on, to threadgroup memory, where all threads
// read them.  A pair of padding gets the number EXPERTS.  INDICES is the type of `indices`: a pointer, which
// is in the constant address space if there are fewer than 8 pairs.
template <int EXPERTS, int PART, int THREADS, typename INDICES>
METAL_FUNC void stage(threadgroup int* experts, INDICES indices, int first, int end, int live,
                      int thread_index) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the part before
  for (int i = thread_index; i < PART && first + i < end; i += THREADS) {
    experts[i] = first + i < live ? int(indices[first + i]) : EXPERTS;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// --- kernel body ---
constexpr int THREADS = SIMDGROUPS * 32;
threadgroup int experts[PART];
threadgroup int counts[EXPERTS + 1];  // and of padding
threadgroup int next[EXPERTS + 1];    // where the next pair of an expert goes

const int thread_index = int(thread_position_in_threadgroup.x);
const int pairs = indices_shape[0];
const int live = int(num_live[0]) * TOP_K;

for (int e = thread_index; e <= EXPERTS; e += THREADS) {
  counts[e] = 0;
}
for (int part = 0; part < pairs; part += PART) {
  stage<EXPERTS, PART, THREADS>(experts, indices, part, pairs, live, thread_index);
  const int size = metal::min(pairs - part, int(PART));
  for (int e = thread_index; e <= EXPERTS; e += THREADS) {
    int count = 0;
    for (int i = 0; i < size; i++) {
      count += experts[i] == e ? 1 : 0;
    }
    counts[e] += count;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int e = thread_index; e <= EXPERTS; e += THREADS) {
  int first = 0;
  int tile = 0;
  for (int before = 0; before < e; before++) {
    first += counts[before];
    tile += (counts[before] + TILE - 1) / TILE;
  }
  next[e] = first;
  const int end = first + counts[e];
  for (; first < end; first += TILE) {
    plan[pairs + 2 * tile] = first;
    const int count = metal::min(end - first, int(TILE));
    plan[pairs + 2 * tile + 1] = e == EXPERTS ? -count : count;
    tile++;
  }
  if (e == EXPERTS) {
    const int used = metal::min(pairs, int(EXPERTS) + 1);
    const int room = metal::min(pairs, (pairs + used * (TILE - 1)) / TILE);
    for (; tile < metal::max(room, int(MIN_TILES)); tile++) {
      plan[pairs + 2 * tile] = 0;
      plan[pairs + 2 * tile + 1] = 0;
    }
  }
}
for (int part = 0; part < pairs; part += PART) {
  stage<EXPERTS, PART, THREADS>(experts, indices, part, pairs, live, thread_index);
  const int size = metal::min(pairs - part, int(PART));
  for (int e = thread_index; e <= EXPERTS; e += THREADS) {
    int to = next[e];
    for (int i = 0; i < size; i++) {
      if (experts[i] == e) {
        plan[to] = part + i;
        to++;
      }
    }
    next[e] = to;
  }
}
