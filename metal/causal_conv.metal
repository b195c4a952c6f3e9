// causal_conv: the short depthwise convolution in front of a recurrent layer, over the packed rows of a
// step.  It also updates, in place, the rows that each request carries to its next step.
//
//   x         (N, X_WIDTH) of T          this step's rows, packed: CHANNELS columns from X_START on
//   weight    (CHANNELS, K) of T         weight[c, K - 1] meets the row itself, weight[c, 0] the oldest
//   bias      (CHANNELS,) of T           not read unless BIAS
//   segments  (S, 2 + 2 M) int32         begin, initial slot, M pairs (end, slot); see recurrence/kernels.py
//   tiles     (T, 2) int32               segment, first row of a tile; see plan_conv_tiles
//   states    (slots, K - 1, CHANNELS) of T  the store: the last K - 1 rows of a request, oldest first;
//                                        declared as an input, and written
//   ticket     float32 -> next_ticket (8,) orders this launch among those that use the store
//   y         (N, CHANNELS) of T         zeros in rows of padding
//
//   y[t, c] = act(bias[c] + sum over j of weight[c, j] * x[t - K + 1 + j, c])     act: SiLU or nothing
//
// where rows before the segment's first are those of the initial slot, and zeros if that is negative.
//
// Who does what.  A thread has one channel of one tile: up to ROWS rows of one segment.  It asks for all
// of them, and for the K - 1 rows before, and then computes in registers.  Lanes have neighbouring
// channels, so rows are read in coalesced runs.
//
//   segment    |  tile 0  |  tile 1  |  tile 2  |.|     a tile of an empty segment has no rows
//   reads       slot, x    x          x         x
//   writes      y, slots   y          y         y
//
// Why it is correct.  The rows in the store are read and replaced by one thread: that of tile 0, which
// reads them first.  Tile 0 also stores the segment's last rows: it copies them from x.  ROWS is at least
// K - 1, so later tiles find all earlier rows in x.  No slot that one segment writes is used by another in
// the same launch, and the ticket orders launches as it does that of kv_write (metal/kv_write.metal).
//
// Cost.  Reads x 1 + (K - 1) / ROWS times and writes y once; the slots of each segment once each way.
#include "activations.h"

// --- kernel body ---
constexpr int PADDING = -2;  // as an initial slot

const int channel = int(thread_position_in_grid.x);
const int tile = int(thread_position_in_grid.y) * 2;
const int at = tiles[tile] * segments_shape[1];
const int last = at + segments_shape[1] - 2;  // the pair of the segment's own end
const int begin = segments[at];
const int initial = segments[at + 1];
const int first = tiles[tile + 1];
const int end = first + ROWS < segments[last] ? first + ROWS : segments[last];

if (channel < CHANNELS && initial == PADDING) {
  for (int t = first; t < end; t++) {
    y[size_t(t) * CHANNELS + channel] = T(0.0f);
  }
}
if (channel < CHANNELS && initial != PADDING) {
  thread T before[K - 1];
  thread float taps[K];
  thread float rows[K - 1 + ROWS];
#pragma unroll
  for (int j = 0; j < K; j++) {
    taps[j] = float(weight[channel * K + j]);
  }
#pragma unroll
  for (int j = 0; j < K - 1; j++) {
    before[j] = T(0.0f);
    if (first > begin) {
      before[j] = x[size_t(first - (K - 1) + j) * X_WIDTH + X_START + channel];
    } else if (initial >= 0) {
      before[j] = states[(size_t(initial) * (K - 1) + j) * CHANNELS + channel];
    }
    rows[j] = float(before[j]);
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    rows[K - 1 + i] =
        first + i < end ? float(x[size_t(first + i) * X_WIDTH + X_START + channel]) : 0.0f;
  }
  const float start = BIAS ? float(bias[channel]) : 0.0f;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (first + i < end) {
      float sum = start;
#pragma unroll
      for (int j = 0; j < K; j++) {
        sum += taps[j] * rows[i + j];
      }
      y[size_t(first + i) * CHANNELS + channel] = T(SILU ? silu(sum) : sum);
    }
  }

  // The rows to carry, at the segment's end and at checkpoints inside it.
  if (first == begin) {
    for (int pair = at + 2; pair <= last; pair += 2) {
      const int slot = segments[pair + 1];
      const int from = segments[pair] - (K - 1);
      if (slot >= 0) {
        device T* to = const_cast<device T*>(states) + size_t(slot) * (K - 1) * CHANNELS + channel;
#pragma unroll
        for (int j = 0; j < K - 1; j++) {
          T carried = before[K - 2];
#pragma unroll
          for (int b = 0; b < K - 2; b++) {
            carried = from + j - begin == b - (K - 1) ? before[b] : carried;
          }
          to[size_t(j) * CHANNELS] =
              from + j >= begin ? x[size_t(from + j) * X_WIDTH + X_START + channel] : carried;
        }
      }
    }
  }
}
if (thread_position_in_grid.y == 0 && channel < 8) {
  next_ticket[channel] = ticket[0];
}
