// A fiber is a stack of its own and a saved stack pointer; switching saves the registers that the
// calling convention asks a function to keep, and nothing else.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace metal_host {

#if defined(__APPLE__)
#define HOST_SYMBOL(name) "_" name
#else
#define HOST_SYMBOL(name) name
#endif

#if defined(__x86_64__)
extern "C" void metal_host_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(".text\n"
    ".globl " HOST_SYMBOL("metal_host_switch") "\n" HOST_SYMBOL("metal_host_switch") ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

// A stack on which the first switch enters `start`.
inline void* new_fiber(char* top, void (*start)()) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
  *--sp = nullptr;  // where `start` would return to; also the alignment after a call
  *--sp = reinterpret_cast<void*>(start);
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  return sp;
}

#elif defined(__aarch64__)
extern "C" void metal_host_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(".text\n.p2align 2\n"
    ".globl " HOST_SYMBOL("metal_host_switch") "\n" HOST_SYMBOL("metal_host_switch") ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");

inline void* new_fiber(char* top, void (*start)()) {
  uintptr_t sp = (reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 160;
  void** saved = reinterpret_cast<void**>(sp);
  for (int i = 0; i < 20; i++) saved[i] = nullptr;
  saved[11] = reinterpret_cast<void*>(start);  // x30: where the switch returns to
  return saved;
}

#else
#error "no fiber switch for this processor: add one beside x86_64 and aarch64"
#endif

}  // namespace metal_host
