// Memory of a plain run: buffers are where Python has them, threadgroup memory is one block.
#include <string.h>

#include "launch.h"

namespace metal_host {

namespace {
const Launch* launch;
alignas(64) char block[kMaxThreadgroupBytes];
void* variables[kMaxVariables];  // by number; null until the threadgroup first names it
void* shared[kMaxBuffers];
size_t used;

void* take(size_t bytes) {
  bytes = (bytes + 15) & ~size_t(15);
  if (used + bytes > kMaxThreadgroupBytes)
    fault("threadgroup memory", {}, "%zu bytes asked for, a threadgroup has %u", used + bytes,
          kMaxThreadgroupBytes);
  void* p = block + used;
  used += bytes;
  memset(p, 0xff, bytes);
  return p;
}
}  // namespace

void memory_start_dispatch(const Launch* what) { launch = what; }

void memory_start_threadgroup(unsigned) {
  used = 0;
  memset(variables, 0, sizeof(variables));
  memset(shared, 0, sizeof(shared));
}

void* group_storage(unsigned id, const char*, size_t bytes, size_t) {
  check_variable(id);
  if (!variables[id]) variables[id] = take(bytes);
  return variables[id];
}

void* threadgroup_argument(unsigned index) {
  if (!shared[index]) shared[index] = take(launch->shared_bytes[index]);
  return shared[index];
}

void* buffer_address(unsigned index) { return launch->buffers[index].address; }

void memory_finish_dispatch(bool) {}
void memory_group_barrier(unsigned) {}
void memory_simd_barrier(unsigned, unsigned) {}

}  // namespace metal_host
