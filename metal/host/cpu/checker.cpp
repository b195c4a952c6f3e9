// Memory of a checked run: every load and store that the kernel's author wrote is looked at here.
//
// The compiler's thread sanitizer calls __tsan_read4(address) and its like before each access; the
// functions of these names are ours (hooks.cpp); no sanitizer's runtime is linked. Buffers are
// copied into an arena with wide gaps, so that a bound is exact and a stray address hits nothing.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "launch.h"
#include "races.h"

namespace metal_host {

namespace {

// One slot a buffer, the buffer in its middle: neighbours are far.
constexpr size_t kSlot = size_t(1) << 30, kSlotStart = kSlot / 4, kSlotMax = kSlot / 2;
// One slot a threadgroup variable; [[threadgroup(i)]] arguments follow the variables.
constexpr size_t kSharedSlot = size_t(1) << 17, kSharedStart = kSharedSlot / 4;
constexpr unsigned kSharedSlots = kMaxVariables + kMaxBuffers;

struct Region {
  char* base;
  size_t bytes;
  char name[48];
  bool writable;
  bool initialised;  // reading what nobody wrote is no fault
  unsigned grain;    // log2 of the bytes of a cell
  Cell* cells;       // null: read-only, nothing to watch but bounds
  unsigned serial;  // the threadgroup for which a threadgroup variable was made
};

const Launch* launch;
char* buffer_arena;
char* shared_arena;
Region buffers[kMaxBuffers];
Region shared[kSharedSlots];
size_t shared_used;
unsigned serial;  // of the running threadgroup, counted over all dispatches
Epochs epochs;

char* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fault("host", {}, "%zu bytes of address space cannot be had", bytes);
  return static_cast<char*>(p);
}

void commit(char* start, size_t bytes) {
  const uintptr_t page = 4096 * 16, from = uintptr_t(start) & ~(page - 1);
  const uintptr_t to = (uintptr_t(start) + bytes + page - 1) & ~(page - 1);
  if (to > from && mprotect(reinterpret_cast<void*>(from), to - from, PROT_READ | PROT_WRITE))
    fault("host", {}, "%zu bytes of memory cannot be had", bytes);
}

unsigned grain_of(size_t element) { return element >= 8 ? 3 : element >= 4 ? 2 : element >= 2; }

size_t count_cells(const Region& r) { return (r.bytes >> r.grain) + 1; }

// Zeros; only pages that are touched take memory.
template <class T>
T* make(size_t count) {
  void* p = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fault("host", {}, "no memory for the checker");
  return static_cast<T*>(p);
}

void drop_cells(Region& r) {
  if (r.cells) munmap(r.cells, count_cells(r) * sizeof(Cell));
  r.cells = nullptr;
}

// A write narrower than a cell: from now on each byte has a cell of its own.
void refine(Region& r) {
  Region fine = r;
  fine.grain = 0;
  fine.cells = make<Cell>(count_cells(fine));
  for (size_t i = 0; i < r.bytes; i++) fine.cells[i] = r.cells[i >> r.grain];
  drop_cells(r);
  r = fine;
}

bool is_shared(const Region& r) { return &r >= shared && &r < shared + kSharedSlots; }

[[noreturn]] void race(const Region& r, size_t offset, bool writes, const Access& earlier,
                       bool earlier_wrote) {
  Fault& f = current_report();
  f.earlier_code = earlier.code;
  char where[96];
  if (earlier.serial() != serial)
    snprintf(where, sizeof(where), "of another threadgroup: nothing in a dispatch orders the two");
  else
    snprintf(where, sizeof(where), "of its threadgroup: no barrier between orders %s memory",
             is_shared(r) ? "threadgroup" : "device");
  fault("race", {}, "%s at byte %zu of %s, after a %s by thread %u %s", writes ? "write" : "read",
        offset, r.name, earlier_wrote ? "write" : "read", earlier.thread(), where);
}

Region* locate(uintptr_t address) {
  const size_t in_buffers = address - uintptr_t(buffer_arena);
  if (in_buffers < kSlot * kMaxBuffers) return &buffers[in_buffers / kSlot];
  const size_t in_shared = address - uintptr_t(shared_arena);
  if (in_shared < kSharedSlot * kSharedSlots) return &shared[in_shared / kSharedSlot];
  return nullptr;
}

}  // namespace

void check_access(const void* address, size_t bytes, bool writes, const void* code) {
  if (on_fiber_stack(address)) return;
  Region* r = locate(uintptr_t(address));
  const char* now = writes ? "write" : "read";
  current_report().code = code_offset(code);
  if (!r && in_image(address)) return;  // a table of constants, or the runtime's own
  if (!r || !r->base)
    fault("out of bounds", {}, "%s of %zu bytes at %p, in no buffer", now, bytes, address);
  const ptrdiff_t offset = static_cast<const char*>(address) - r->base;
  if (offset < 0)
    fault("out of bounds", {}, "%s of %zu bytes, %td bytes before %s", now, bytes, -offset, r->name);
  if (size_t(offset) + bytes > r->bytes)
    fault("out of bounds", {}, "%s of %zu bytes at byte %td of %s, which has %zu bytes", now, bytes,
          offset, r->name, r->bytes);
  if (writes && !r->writable)
    fault("read-only", {}, "write at byte %td of the input %s", offset, r->name);
  if (!r->cells) return;
  if (writes && bytes < size_t(1) << r->grain) refine(*r);

  const bool in_threadgroup = is_shared(*r);
  const Access me = epochs.access(serial, *self, in_threadgroup ? kThreadgroup : kDevice,
                                  current_report().code);
  const size_t last = (offset + bytes - 1) >> r->grain;
  for (size_t i = offset >> r->grain; i <= last; i++) {
    Cell& cell = r->cells[i];
    if (in_threadgroup && cell.serial != serial) cell = {{}, {}, serial};  // another threadgroup's
    if (!writes && !r->initialised && !cell.writer.who)
      fault("uninitialised", {}, "read at byte %zu of %s, which nobody has written", i << r->grain,
            r->name);
    if (const Access* earlier = note(cell, me, writes))
      race(*r, i << r->grain, writes, *earlier, earlier == &cell.writer);
  }
}

void memory_start_dispatch(const Launch* what) {
  launch = what;
  if (!buffer_arena) {
    buffer_arena = reserve(kSlot * kMaxBuffers);
    shared_arena = reserve(kSharedSlot * kSharedSlots);
  }
  for (unsigned i = 0; i < kMaxBuffers; i++) {
    Region& r = buffers[i];
    const Buffer& b = what->buffers[i];
    r = {};
    r.base = buffer_arena + i * kSlot + kSlotStart + b.misaligned;
    if (i >= what->num_buffers || !b.name) continue;
    snprintf(r.name, sizeof(r.name), "%s", b.name);
    if (b.bytes > kSlotMax) fault("host", {}, "%s is too large to be checked", b.name);
    r.bytes = b.bytes;
    r.writable = b.writable;
    r.initialised = b.initialised;
    r.grain = grain_of(b.element);
    commit(r.base, r.bytes);
    if (r.bytes) memcpy(r.base, b.address, r.bytes);
    if (r.writable) r.cells = make<Cell>(count_cells(r));
  }
}

void memory_finish_dispatch(bool failed) {
  if (!failed) current_report().code = 0;
  const Region* unfilled = nullptr;
  size_t missing = 0, first = 0;  // cells of it
  for (unsigned i = 0; i < launch->num_buffers; i++) {
    Region& r = buffers[i];
    const Buffer& b = launch->buffers[i];
    if (r.cells && !b.initialised && !failed && !unfilled) {
      for (size_t c = r.bytes >> r.grain; c-- > 0;)
        if (!r.cells[c].writer.who) missing++, first = c;
      if (missing) unfilled = &r;
    }
    drop_cells(r);
    if (r.writable && r.bytes) memcpy(b.address, r.base, r.bytes);
    if (r.bytes) madvise(reinterpret_cast<void*>(uintptr_t(r.base) & ~uintptr_t(65535)),
                         r.bytes + 65536, MADV_DONTNEED);
  }
  if (unfilled)
    fault("unwritten", {}, "%zu of %zu elements of the output %s, from byte %zu on", missing,
          unfilled->bytes >> unfilled->grain, unfilled->name, first << unfilled->grain);
}

void memory_start_threadgroup(unsigned) {
  shared_used = 0;
  epochs = {};
  if (++serial >= kMaxSerial) {  // numbers start again: nothing older may be left
    for (Region& r : shared)
      drop_cells(r);
    serial = 1;
  }
}

static void* shared_region(unsigned slot, const char* name, size_t bytes, size_t element) {
  Region& r = shared[slot];
  if (r.serial == serial) return r.base;
  shared_used += (bytes + 15) & ~size_t(15);
  if (shared_used > kMaxThreadgroupBytes)
    fault("threadgroup memory", {}, "%zu bytes asked for, a threadgroup has %u", shared_used,
          kMaxThreadgroupBytes);
  if (r.bytes != bytes || !r.cells) {
    drop_cells(r);
    r.base = shared_arena + slot * kSharedSlot + kSharedStart;
    r.bytes = bytes;
    r.grain = grain_of(element);
    r.writable = true;
    snprintf(r.name, sizeof(r.name), "threadgroup %s", name);
    commit(r.base, bytes);
    r.cells = make<Cell>(count_cells(r));
  }
  r.serial = serial;
  memset(r.base, 0xff, bytes);
  return r.base;
}

void* group_storage(unsigned id, const char* name, size_t bytes, size_t element) {
  check_variable(id);
  return shared_region(id, name, bytes, element);
}
void* threadgroup_argument(unsigned index) {
  return shared_region(kMaxVariables + index, "argument", launch->shared_bytes[index], 1);
}
void* buffer_address(unsigned index) { return buffers[index].base; }

void memory_group_barrier(unsigned flags) { epochs.group_barrier(flags); }
void memory_simd_barrier(unsigned simdgroup, unsigned flags) { epochs.simd_barrier(simdgroup, flags); }

}  // namespace metal_host
