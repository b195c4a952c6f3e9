// What Python hands over for one dispatch, and what comes back (mirrored in launch.py), and what
// the scheduler tells the memory, plain (memory.cpp) or checked (checker.cpp).
#pragma once

#include "runtime.h"

// The linker's name for where the library begins.
#if defined(__APPLE__)
extern "C" const char _mh_dylib_header[];
#define HOST_IMAGE _mh_dylib_header
#else
extern "C" HOST_INTERNAL const char __ehdr_start[];
#define HOST_IMAGE __ehdr_start
#endif

namespace metal_host {

constexpr size_t kStackBytes = 256 << 10;  // of one thread
constexpr unsigned kMaxVariables = 256;    // threadgroup variables of a text
HOST_INTERNAL extern char* stacks;

enum Schedule : uint32_t { kForward = 0, kReverse = 1, kRandom = 2 };

struct Buffer {
  void* address;
  uint64_t bytes;
  const char* name;
  uint32_t writable;     // a write is no fault
  uint32_t initialised;  // if not, no read may come before a write, and every element is to be written
  uint32_t element;      // bytes of one element: the grain of the race checker
  uint32_t misaligned;   // bytes past a boundary of 16 at which it would lie on a GPU
};

struct Launch {
  uint32_t grid[3];
  uint32_t threads[3];
  uint32_t schedule;
  uint64_t seed;
  uint32_t num_buffers;
  uint32_t num_shared;
  Buffer buffers[kMaxBuffers];
  uint32_t shared_bytes[kMaxBuffers];  // of each [[threadgroup(i)]] argument
};

struct Fault {
  char kind[32];
  char message[512];
  char file[512];
  uint32_t line;
  uint32_t has_thread;
  uint32_t group[3];
  uint32_t thread[3];
  uint32_t code;          // where in the library it happened, for when no line is known
  uint32_t earlier_code;  // of a race, where the first access was
};
HOST_INTERNAL Fault& current_report();

HOST_INTERNAL void memory_start_dispatch(const Launch* launch);
HOST_INTERNAL void memory_finish_dispatch(bool failed);
HOST_INTERNAL void memory_start_threadgroup(unsigned number);
HOST_INTERNAL void memory_group_barrier(unsigned flags);
HOST_INTERNAL void memory_simd_barrier(unsigned simdgroup, unsigned flags);
HOST_INTERNAL bool in_image(const void* address);  // the library's own code and data
inline bool on_fiber_stack(const void* address) {
  return size_t(static_cast<const char*>(address) - stacks) < kMaxThreads * kStackBytes;
}
inline void check_variable(unsigned id) {
  if (id >= kMaxVariables) fault("host", {}, "more than %u threadgroup variables", kMaxVariables);
}
inline uint32_t code_offset(const void* code) {
  return uint32_t(static_cast<const char*>(code) - HOST_IMAGE);
}
// Before each access of a checked run.
HOST_INTERNAL void check_access(const void* address, size_t bytes, bool writes, const void* code);

}  // namespace metal_host
