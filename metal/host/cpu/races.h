// Who touched a piece of memory last, and whether that can have happened at the same time as now.
//
// Threads of a threadgroup meet at barriers, all together: two accesses are ordered if and only if
// a barrier lies between them, so that counting barriers suffices and the answer does not depend on
// the order in which the host happens to run the threads. A simdgroup_barrier orders one simdgroup,
// a barrier's mem_flags say which memory it orders, and nothing orders two threadgroups.
#pragma once

#include "runtime.h"

namespace metal_host {

constexpr unsigned kMaxSerial = 1u << 22;

// One access, packed: valid 1, unused 1, threadgroup 22, thread 10, group barriers 16, simdgroup
// barriers 14.
struct __attribute__((packed, aligned(4))) Access {
  uint64_t who;
  uint32_t code;  // the instruction, as an offset in the library

  unsigned serial() const { return who >> 40 & (kMaxSerial - 1); }
  unsigned thread() const { return who >> 30 & 1023; }
  unsigned group_epoch() const { return who >> 14 & 0xffff; }
  unsigned simd_epoch() const { return who & 0x3fff; }
  unsigned simdgroup() const { return thread() / kLanes; }
};

class Epochs {
 public:
  void group_barrier(unsigned flags) {
    if (flags & kDevice) group_[0]++;
    if (flags & kThreadgroup) group_[1]++;
  }
  void simd_barrier(unsigned simdgroup, unsigned flags) {
    if (flags & kDevice) simd_[simdgroup][0]++;
    if (flags & kThreadgroup) simd_[simdgroup][1]++;
  }
  Access access(unsigned serial, const Thread& thread, MemFlags space, uint32_t code) const {
    const unsigned s = space == kThreadgroup;
    return {uint64_t(1) << 63 | uint64_t(serial) << 40 | uint64_t(thread.index) << 30 |
                uint64_t(group_[s] & 0xffff) << 14 | (simd_[thread.simdgroup][s] & 0x3fff),
            code};
  }

 private:
  unsigned group_[2] = {};
  unsigned simd_[kMaxThreads / kLanes][2] = {};
};

inline bool concurrent(const Access& earlier, const Access& now) {
  if (!earlier.who) return false;
  if (earlier.serial() != now.serial()) return true;
  if (earlier.thread() == now.thread() || earlier.group_epoch() != now.group_epoch()) return false;
  return earlier.simdgroup() != now.simdgroup() || earlier.simd_epoch() == now.simd_epoch();
}

// Of many accesses of one kind, as many as are needed to find one that is concurrent with an access
// to come, if there is any.
struct Recent {
  Access last;
  Access same_simd;    // the last by another thread of the simdgroup of `last`
  Access other_simd;   // the last of another simdgroup: whoever comes is concurrent with one of both
  Access other_group;  // one of an earlier threadgroup

  void add(const Access& me) {
    if (last.who && last.serial() != me.serial()) other_group = last;
    if (!last.who || last.serial() != me.serial() || last.group_epoch() != me.group_epoch()) {
      same_simd = other_simd = {};  // ordered before whatever comes
    } else if (last.simdgroup() != me.simdgroup()) {
      other_simd = last;
      same_simd = {};
    } else if (last.thread() != me.thread()) {
      same_simd = last;
    }
    last = me;
  }

  // Null, or one that is concurrent.
  const Access* find(const Access& me) const {
    const Access* const all[] = {&last, &same_simd, &other_simd, &other_group};
    for (const Access* a : all)
      if (concurrent(*a, me)) return a;
    return nullptr;
  }
};

// What is remembered of one piece of memory. A write forgets what came before: it was found to be
// ordered before the write, and so is ordered before all that will be ordered after it.
struct Cell {
  Access writer;
  Recent readers;
  uint32_t serial;  // threadgroup memory: whose it is
};

// Notes an access; null, or the earlier access with which it races.
inline const Access* note(Cell& cell, const Access& me, bool writes) {
  if (concurrent(cell.writer, me)) return &cell.writer;
  if (writes) {
    if (const Access* reader = cell.readers.find(me)) return reader;
    cell = {me, {}, cell.serial};
  } else {
    cell.readers.add(me);
  }
  return nullptr;
}

}  // namespace metal_host
