// Executes one dispatch: threadgroups one after another, the threads of each as fibers that switch
// where they wait for each other, and nowhere else.
#include "runtime.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fiber.h"
#include "launch.h"

// The kernel, called once a thread with its own arguments (see translate.py).
extern "C" HOST_INTERNAL void metal_host_kernel();

// clang moves a __bf16 through a float where the CPU has no bf16 instructions, and calls this to
// get it back. Compiler runtimes are not sure to have it: zig's and libgcc 12 do not.
extern "C" HOST_INTERNAL __bf16 __truncsfbf2(float value) {
  uint32_t u = __builtin_bit_cast(uint32_t, value);
  // To nearest, ties to even; a NaN keeps its upper bits.
  if ((u & 0x7fffffff) <= 0x7f800000) u += 0x7fff + (u >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(u >> 16));
}

namespace metal_host {

Thread* self;
Dispatch dispatch;
char* stacks;

namespace {

// Stacks start at unlike offsets: at like ones all would fight for the same lines of the cache.
constexpr size_t kStackColours = 64 << 10, kStackColour = 13 * 64;

struct Fiber {
  void* stack_pointer;
  Thread thread;
  Site site;         // where it waits
  const char* what;  // and in what
};

struct Simdgroup {
  Exchange exchange[2];  // in turn: a fast lane gives its next value while slow ones still read
  unsigned turn;
  unsigned runnable, arrived, returned;  // a bit a lane
};

Fiber fibers[kMaxThreads];
Simdgroup simdgroups[kMaxThreads / kLanes];
void* main_stack_pointer;
Fiber* running;  // null outside of a threadgroup
jmp_buf outside_fibers;

unsigned groups_runnable;  // a bit for each simdgroup with a runnable lane
unsigned barrier_arrived, threads_returned;
unsigned last_simdgroup;

const Launch* launch;
Fault* report;
uint64_t random_state;

unsigned random_below(unsigned n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return unsigned((random_state >> 11) % n);
}

// One set bit of a mask that has some, by the schedule.
unsigned choose(unsigned mask) {
  switch (launch->schedule) {
    case kReverse:
      return 31 - __builtin_clz(mask);
    case kRandom: {
      for (unsigned n = random_below(__builtin_popcount(mask)); n > 0; n--) mask &= mask - 1;
      return __builtin_ctz(mask);
    }
    default:
      return __builtin_ctz(mask);
  }
}

// The next fiber to run, or none. The simdgroup that ran last runs as long as it can.
Fiber* next_fiber() {
  if (!groups_runnable) return nullptr;
  if (launch->schedule == kRandom || !simdgroups[last_simdgroup].runnable)
    last_simdgroup = choose(groups_runnable);
  return &fibers[last_simdgroup * kLanes + choose(simdgroups[last_simdgroup].runnable)];
}

void set_runnable(unsigned simdgroup, unsigned lanes) {
  simdgroups[simdgroup].runnable = lanes;
  const unsigned bit = 1u << simdgroup;
  groups_runnable = lanes ? groups_runnable | bit : groups_runnable & ~bit;
}

void run(Fiber* fiber, void** save) {
  running = fiber;
  self = &fiber->thread;
  metal_host_switch(save, fiber->stack_pointer);
}

void leave() {
  running = nullptr;
  void* unused;
  metal_host_switch(&unused, main_stack_pointer);
}

[[noreturn]] void deadlock() {
  const Fiber* first = nullptr;
  const Fiber* other = nullptr;
  for (unsigned i = 0; i < dispatch.group_size; i++) {
    const Fiber* f = &fibers[i];
    if (!f->what) continue;
    if (!first) first = f;
    else if (!other && (f->site.line != first->site.line || f->what != first->what)) other = f;
  }
  self = const_cast<Thread*>(&first->thread);
  if (other)
    fault("divergence", first->site, "thread %u waits in %s, thread %u in %s at line %u",
          first->thread.index, first->what, other->thread.index, other->what, other->site.line);
  fault("divergence", first->site, "%u of %u threads wait in %s; the others have returned",
        dispatch.group_size - threads_returned, dispatch.group_size, first->what);
}

// Gives the CPU to others until this thread is made runnable again.
void wait(Site site, const char* what) {
  Fiber* me = running;
  me->site = site;
  me->what = what;
  Fiber* next = next_fiber();
  if (!next) deadlock();
  if (next != me) run(next, &me->stack_pointer);
  me->what = nullptr;
}

void fiber_main() {
  metal_host_kernel();
  Simdgroup& s = simdgroups[self->simdgroup];
  const unsigned bit = 1u << self->lane;
  s.returned |= bit;
  set_runnable(self->simdgroup, s.runnable & ~bit);
  threads_returned++;
  running->what = nullptr;
  Fiber* next = next_fiber();
  if (!next && threads_returned < dispatch.group_size) deadlock();
  if (next) run(next, &running->stack_pointer);
  leave();
}

void check_same_site(Site mine, const char* what, const Fiber& other) {
  const auto same = [](const char* a, const char* b) { return a == b || strcmp(a, b) == 0; };
  if (other.site.line == mine.line && same(other.what, what) && same(other.site.file, mine.file))
    return;
  fault("divergence", mine, "thread %u is in %s, thread %u of the same %s in %s at line %u",
        self->index, what, other.thread.index,
        strcmp(what, "threadgroup_barrier") == 0 ? "threadgroup" : "simdgroup", other.what,
        other.site.line);
}

// True for the last lane to come: the others wait in here.
bool arrive(Simdgroup& s, Site site, const char* what) {
  const unsigned me = self->simdgroup, bit = 1u << self->lane, all = s.exchange[0].lanes;
  if (s.returned)
    fault("divergence", site, "%s: lane %u of the simdgroup has returned already", what,
          __builtin_ctz(s.returned));
  if (s.arrived)
    check_same_site(site, what, fibers[me * kLanes + __builtin_ctz(s.arrived)]);
  s.arrived |= bit;
  if (s.arrived == all) return true;
  set_runnable(me, s.runnable & ~bit);
  wait(site, what);
  return false;
}

void release(Simdgroup& s) {
  s.arrived = 0;
  set_runnable(self->simdgroup, s.exchange[0].lanes);
  if (launch->schedule == kRandom) wait({}, nullptr);
}

void start_threads() {
  const unsigned* n = dispatch.group_threads;
  groups_runnable = barrier_arrived = threads_returned = last_simdgroup = 0;
  for (unsigned i = 0; i < dispatch.group_size; i++) {
    Fiber& f = fibers[i];
    const unsigned at[3] = {i % n[0], i / n[0] % n[1], i / n[0] / n[1]};
    for (int d = 0; d < 3; d++) {
      f.thread.position_in_threadgroup[d] = at[d];
      f.thread.position_in_grid[d] = dispatch.group[d] * dispatch.threads[d] + at[d];
    }
    f.thread.index = i;
    f.thread.simdgroup = i / kLanes;
    f.thread.lane = i % kLanes;
    f.what = nullptr;
    char* top = stacks + (i + 1) * kStackBytes - i * kStackColour % kStackColours;
    f.stack_pointer = new_fiber(top, fiber_main);
  }
  for (unsigned g = 0; g * kLanes < dispatch.group_size; g++) {
    Simdgroup& s = simdgroups[g];
    const unsigned lanes = dispatch.group_size - g * kLanes;
    s.exchange[0].lanes = s.exchange[1].lanes = lanes >= kLanes ? ~0u : (1u << lanes) - 1;
    s.arrived = s.returned = s.turn = 0;
    set_runnable(g, s.exchange[0].lanes);
  }
}

void run_threadgroup(unsigned number) {
  unsigned rest = number;
  dispatch.group_size = 1;
  for (int d = 0; d < 3; d++) {
    dispatch.group[d] = rest % dispatch.groups[d];
    rest /= dispatch.groups[d];
    const unsigned left = dispatch.grid[d] - dispatch.group[d] * dispatch.threads[d];
    dispatch.group_threads[d] = left < dispatch.threads[d] ? left : dispatch.threads[d];
    dispatch.group_size *= dispatch.group_threads[d];
  }
  start_threads();
  memory_start_threadgroup(number);
  run(next_fiber(), &main_stack_pointer);
}

// The order in which threadgroups run: nothing on a GPU promises one.
unsigned* threadgroup_order(unsigned count) {
  unsigned* order = static_cast<unsigned*>(malloc(count * sizeof(unsigned)));
  for (unsigned i = 0; i < count; i++) order[i] = launch->schedule == kReverse ? count - 1 - i : i;
  if (launch->schedule == kRandom)
    for (unsigned i = count - 1; i > 0; i--) {
      const unsigned j = random_below(i + 1), t = order[i];
      order[i] = order[j];
      order[j] = t;
    }
  return order;
}

}  // namespace

const Exchange& simd_meet(Site site, const char* what, const void* value, size_t bytes,
                          void (*finish)(Exchange&)) {
  Simdgroup& s = simdgroups[self->simdgroup];
  Exchange& e = s.exchange[s.turn];
  memcpy(e.value[self->lane], value, bytes);
  if (arrive(s, site, what)) {
    if (finish) finish(e);
    s.turn ^= 1;
    release(s);
  }
  return e;
}

void simd_barrier(Site site, unsigned flags) {
  Simdgroup& s = simdgroups[self->simdgroup];
  if (!arrive(s, site, "simdgroup_barrier")) return;
  memory_simd_barrier(self->simdgroup, flags);
  release(s);
}

void group_barrier(Site site, unsigned flags) {
  static unsigned first;  // the thread that came first: all others must come to its line
  const char* what = "threadgroup_barrier";
  if (threads_returned)
    fault("divergence", site, "%s: %u threads of the threadgroup have returned already", what,
          threads_returned);
  if (barrier_arrived) check_same_site(site, what, fibers[first]);
  else first = self->index;
  if (++barrier_arrived < dispatch.group_size) {
    set_runnable(self->simdgroup, simdgroups[self->simdgroup].runnable & ~(1u << self->lane));
    wait(site, what);
    return;
  }
  barrier_arrived = 0;
  memory_group_barrier(flags);
  for (unsigned g = 0; g * kLanes < dispatch.group_size; g++)
    set_runnable(g, simdgroups[g].exchange[0].lanes);
  if (launch->schedule == kRandom) wait({}, nullptr);
}

void fault(const char* kind, Site site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(report->message, sizeof(report->message), format, arguments);
  va_end(arguments);
  snprintf(report->kind, sizeof(report->kind), "%s", kind);
  snprintf(report->file, sizeof(report->file), "%s", site.file ? site.file : "");
  report->line = site.line;
  if (site.line) report->code = 0;
  report->has_thread = self != nullptr;
  if (self) {
    memcpy(report->group, dispatch.group, sizeof(report->group));
    memcpy(report->thread, self->position_in_threadgroup, sizeof(report->thread));
  }
  // The fibers of this dispatch are never resumed.
  if (running) leave();
  longjmp(outside_fibers, 1);
}

Fault& current_report() { return *report; }

bool in_image(const void* address) {
  // What lies between two places of the image is of the image: few questions to the loader.
  static const void* first = HOST_IMAGE;
  static const void* last = HOST_IMAGE;
  if (address >= first && address <= last) return true;
  Dl_info info;
  if (!dladdr(address, &info) || info.dli_fbase != HOST_IMAGE) return false;
  if (address < first) first = address;
  if (address > last) last = address;
  return true;
}

}  // namespace metal_host

using namespace metal_host;

static void start(const Launch* what, Fault* out) {
  launch = what;
  report = out;
  self = nullptr;
  running = nullptr;
  if (!stacks) {
    void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fault("host", {}, "no memory for the stacks of the threads");
    stacks = static_cast<char*>(memory);
  }
  for (int d = 0; d < 3; d++) {
    dispatch.grid[d] = what->grid[d];
    dispatch.threads[d] = what->threads[d];
    dispatch.groups[d] = (what->grid[d] + what->threads[d] - 1) / what->threads[d];
  }
  random_state = 0x9e3779b97f4a7c15ull ^ (what->seed + 1) * 0x2545f4914f6cdd1dull;
  memory_start_dispatch(what);
}

// Runs one dispatch; 0, or 1 with `out` saying what went wrong.
HOST_EXPORT int metal_host_launch(const Launch* what, Fault* out) {
  if (setjmp(outside_fibers)) return 1;
  start(what, out);
  const unsigned count = dispatch.groups[0] * dispatch.groups[1] * dispatch.groups[2];
  unsigned* order = threadgroup_order(count);
  for (unsigned i = 0; i < count && !out->kind[0]; i++) run_threadgroup(order[i]);
  free(order);
  self = nullptr;
  memory_finish_dispatch(out->kind[0] != 0);
  return out->kind[0] != 0;
}

// Where the library is loaded.
HOST_EXPORT uint64_t metal_host_image() { return uint64_t(HOST_IMAGE); }
