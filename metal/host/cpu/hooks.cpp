// The functions that compilers call under -fsanitize=thread and -fsanitize=undefined.
#include <stdio.h>
#include <string.h>

#include "launch.h"

using metal_host::check_access;

// ---- thread: before each load and store ----

#define HOST_HOOK extern "C" HOST_INTERNAL
#define HOST_CALLER __builtin_return_address(0)
#define HOST_ACCESS(bytes)                                                                       \
  HOST_HOOK void __tsan_read##bytes(void* p) { check_access(p, bytes, false, HOST_CALLER); } \
  HOST_HOOK void __tsan_write##bytes(void* p) { check_access(p, bytes, true, HOST_CALLER); } \
  HOST_HOOK void __tsan_unaligned_read##bytes(void* p) {                                         \
    check_access(p, bytes, false, HOST_CALLER);                                           \
  }                                                                                              \
  HOST_HOOK void __tsan_unaligned_write##bytes(void* p) {                                        \
    check_access(p, bytes, true, HOST_CALLER);                                            \
  }                                                                                              \
  HOST_HOOK void __tsan_volatile_read##bytes(void* p) {                                          \
    check_access(p, bytes, false, HOST_CALLER);                                           \
  }                                                                                              \
  HOST_HOOK void __tsan_volatile_write##bytes(void* p) {                                         \
    check_access(p, bytes, true, HOST_CALLER);                                            \
  }
HOST_ACCESS(1)
HOST_ACCESS(2)
HOST_ACCESS(4)
HOST_ACCESS(8)
HOST_ACCESS(16)

static void check_range(const void* p, size_t bytes, bool writes, const void* code) {
  if (bytes) check_access(p, bytes, writes, code);
}
HOST_HOOK void __tsan_read_range(void* p, size_t n) { check_range(p, n, false, HOST_CALLER); }
HOST_HOOK void __tsan_write_range(void* p, size_t n) { check_range(p, n, true, HOST_CALLER); }
HOST_HOOK void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check_range(from, n, false, HOST_CALLER);
  check_range(to, n, true, HOST_CALLER);
  return memcpy(to, from, n);
}
HOST_HOOK void* __tsan_memmove(void* to, const void* from, size_t n) {
  check_range(from, n, false, HOST_CALLER);
  check_range(to, n, true, HOST_CALLER);
  return memmove(to, from, n);
}
HOST_HOOK void* __tsan_memset(void* to, int value, size_t n) {
  check_range(to, n, true, HOST_CALLER);
  return memset(to, value, n);
}
HOST_HOOK void __tsan_init() {}
HOST_HOOK void __tsan_func_entry(void*) {}
HOST_HOOK void __tsan_func_exit() {}

// ---- undefined: when it has happened ----

namespace {
// How the data of every handler begins, as compilers lay it out.
struct Location {
  const char* file;
  uint32_t line, column;
};
struct TypeName {
  uint16_t kind, info;
  char text[1];
};
struct TypeMismatch {
  Location at;
  const TypeName* type;
  unsigned char log_alignment, check;
};
struct OutOfBounds {
  Location at;
  const TypeName* array;
};

metal_host::Site site(const void* data) {
  const Location* at = static_cast<const Location*>(data);
  return {at->file, at->line};
}
}  // namespace

#define HOST_UNDEFINED(name, message)                                              \
  HOST_HOOK void __ubsan_handle_##name(const void* data) {                         \
    metal_host::fault("undefined", site(data), message);                           \
  }
HOST_UNDEFINED(add_overflow, "an addition of signed integers overflows")
HOST_UNDEFINED(sub_overflow, "a subtraction of signed integers overflows")
HOST_UNDEFINED(mul_overflow, "a product of signed integers overflows")
HOST_UNDEFINED(negate_overflow, "the negation of a signed integer overflows")
HOST_UNDEFINED(divrem_overflow, "an integer is divided by zero, or its quotient overflows")
HOST_UNDEFINED(shift_out_of_bounds, "a shift by a negative number or by too many bits")
HOST_UNDEFINED(pointer_overflow, "arithmetic on a pointer leaves the address space")
HOST_UNDEFINED(float_cast_overflow, "a float that is NaN or too large becomes an integer")
HOST_UNDEFINED(load_invalid_value, "a value that its type (bool or enum) cannot have is read")
HOST_UNDEFINED(builtin_unreachable, "a place is reached that was declared unreachable")
HOST_UNDEFINED(missing_return, "a function ends without its return")
HOST_UNDEFINED(invalid_builtin, "clz or ctz of zero")
HOST_UNDEFINED(nonnull_arg, "a null pointer where none may be")
HOST_UNDEFINED(vla_bound_not_positive, "an array of no positive length")
HOST_UNDEFINED(alignment_assumption, "a pointer is less aligned than was promised")

HOST_HOOK void __ubsan_handle_out_of_bounds(const OutOfBounds* data, size_t index) {
  metal_host::fault("out of bounds", site(data), "index %zd of %s", index, data->array->text);
}
HOST_HOOK void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, const void* address) {
  const uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  if (!address) metal_host::fault("null pointer", site(data), "%s at address 0", data->type->text);
  if (uintptr_t(address) & (alignment - 1))
    metal_host::fault("misaligned", site(data), "%s wants a multiple of %zu, the address is %zu past one",
                      data->type->text, alignment, uintptr_t(address) & (alignment - 1));
  metal_host::fault("out of bounds", site(data), "no room for %s", data->type->text);
}
