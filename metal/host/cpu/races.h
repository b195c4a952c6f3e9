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

// One access, packed: valid 1, atomic 1, threadgroup 22, thread 10, group barriers 16, simdgroup
// barriers 14.
struct __attribute__((packed, aligned(4))) Access {
  uint64_t who;
  uint32_t code;  // the instruction, as an offset in the library

  bool atomic() const { return who >> 62 & 1; }
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
  Access access(unsigned serial, const Thread& thread, MemFlags space, bool atomic,
                uint32_t code) const {
    const unsigned s = space == kThreadgroup;
    return {uint64_t(1) << 63 | uint64_t(atomic) << 62 | uint64_t(serial) << 40 |
                uint64_t(thread.index) << 30 | uint64_t(group_[s] & 0xffff) << 14 |
                (simd_[thread.simdgroup][s] & 0x3fff),
            code};
  }

 private:
  unsigned group_[2] = {};
  unsigned simd_[kMaxThreads / kLanes][2] = {};
};

// What is remembered of one piece of memory: its last writer, and of the readers since as many as
// are needed to find a racing one if there is any.
struct Cell {
  Access writer;
  Access reader;       // the last
  Access same_simd;    // the last by another thread of that reader's simdgroup
  Access other_simd;   // the last of another simdgroup
  Access other_group;  // one of an earlier threadgroup

  unsigned serial() const { return writer.who ? writer.serial() : reader.serial(); }

  // Null, or the access that races with this one.
  const Access* read(const Access& me) {
    if (concurrent(writer, me)) return &writer;
    if (!reader.who || reader.serial() != me.serial()) {
      if (reader.who) other_group = reader;
      forget_group();
    } else if (reader.group_epoch() != me.group_epoch()) {
      forget_group();
    } else if (reader.simdgroup() != me.simdgroup()) {
      other_simd = reader;  // whoever writes now races with one of the two
      same_simd = {};
    } else if (reader.thread() != me.thread()) {
      same_simd = reader;
    }
    reader = me;
    return nullptr;
  }

  const Access* write(const Access& me) {
    const Access* const remembered[] = {&writer, &reader, &same_simd, &other_simd, &other_group};
    for (const Access* a : remembered)
      if (concurrent(*a, me)) return a;
    // Whatever comes later is ordered after the earlier accesses if it is after this one.
    *this = {me};
    return nullptr;
  }

 private:
  void forget_group() { same_simd = other_simd = {}; }

  static bool concurrent(const Access& earlier, const Access& now) {
    if (!earlier.who || (earlier.atomic() && now.atomic())) return false;
    if (earlier.serial() != now.serial()) return true;
    if (earlier.thread() == now.thread() || earlier.group_epoch() != now.group_epoch())
      return false;
    return earlier.simdgroup() != now.simdgroup() || earlier.simd_epoch() == now.simd_epoch();
  }
};

}  // namespace metal_host
