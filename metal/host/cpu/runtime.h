// What kernels, the checker and the scheduler share: where a thread is, and how threads meet.
#pragma once

#include <stddef.h>
#include <stdint.h>

// The library of a kernel exports its entry points only.
#define HOST_INTERNAL __attribute__((visibility("hidden")))
#define HOST_EXPORT extern "C" __attribute__((visibility("default")))

namespace metal_host {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxBuffers = 64;
constexpr unsigned kMaxThreadgroupBytes = 32768;  // what every Apple GPU has
constexpr unsigned kValueBytes = 32;              // the widest value a lane can share

// A place in the kernel's source. As a default argument it names the caller's line.
struct Site {
  const char* file;
  unsigned line;
  static constexpr Site here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Thread {
  unsigned position_in_grid[3];
  unsigned position_in_threadgroup[3];
  unsigned index;      // in its threadgroup
  unsigned simdgroup;  // index / 32
  unsigned lane;       // index % 32
};

struct Dispatch {
  unsigned grid[3];              // threads
  unsigned threads[3];           // of one whole threadgroup
  unsigned groups[3];            // threadgroups
  unsigned group[3];             // the running threadgroup
  unsigned group_threads[3];     // its threads: fewer at the grid's edge
  unsigned group_size;           // their product
};

enum MemFlags : unsigned { kNone = 0, kDevice = 1, kThreadgroup = 2 };

// What the lanes of a simdgroup hand to each other.
struct Exchange {
  alignas(16) unsigned char value[kLanes][kValueBytes];
  alignas(16) unsigned char result[kLanes][kValueBytes];
  unsigned lanes;  // a bit for each lane that exists
};

HOST_INTERNAL extern Thread* self;
HOST_INTERNAL extern Dispatch dispatch;

// Gives `value` and waits until every lane of the simdgroup has come to this site; the last to come
// runs `finish` once. The exchange stays valid until the lane's next-but-one meeting.
HOST_INTERNAL const Exchange& simd_meet(Site site, const char* what, const void* value, size_t bytes,
                                        void (*finish)(Exchange&));
HOST_INTERNAL void simd_barrier(Site site, unsigned flags);
HOST_INTERNAL void group_barrier(Site site, unsigned flags);

// The storage of the threadgroup variable number `id`, one for the whole threadgroup; `element` is
// the bytes of what its threads may share without racing.
HOST_INTERNAL void* group_storage(unsigned id, const char* name, size_t bytes, size_t element);
HOST_INTERNAL void* buffer_address(unsigned index);
HOST_INTERNAL void* threadgroup_argument(unsigned index);

[[noreturn]] HOST_INTERNAL void fault(const char* kind, Site site, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

}  // namespace metal_host
