// Atomics. Fibers share one CPU thread, so that a plain operation is already indivisible; the
// runtime is told, for the checker's sake and so that a random schedule can switch threads here.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> ||
                    is_same_v<T, ulong> || is_same_v<T, float>,
                "Metal has atomics of int, uint, bool, ulong and float");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;

namespace host {
template <class T>
using plain = std::type_identity_t<T>;
// Goes past the sanitizer's view of memory: the runtime has been told already.
template <class T>
__attribute__((no_sanitize("thread"), noinline)) T peek(const volatile T* p) {
  return *p;
}
template <class T>
__attribute__((no_sanitize("thread"), noinline)) void poke(volatile T* p, plain<T> v) {
  *p = v;
}
template <class T, class F>
inline T update(volatile atomic<T>* object, F f) {
  volatile T* p = &object->value;
  metal_host::atomic_access((const void*)p, sizeof(T), true);
  const T old = peek(p);
  poke(p, f(old));
  return old;
}
}  // namespace host

template <class T>
inline T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  metal_host::atomic_access((const void*)&object->value, sizeof(T), false);
  return host::peek(&object->value);
}
template <class T>
inline void atomic_store_explicit(volatile atomic<T>* object, host::plain<T> v, memory_order) {
  host::update(object, [v](T) { return v; });
}
template <class T>
inline T atomic_exchange_explicit(volatile atomic<T>* object, host::plain<T> v, memory_order) {
  return host::update(object, [v](T) { return v; });
}
#define HOST_FETCH(name, expression)                                                            \
  template <class T>                                                                            \
  inline T atomic_fetch_##name##_explicit(volatile atomic<T>* object, host::plain<T> b,         \
                                          memory_order) {                                       \
    return host::update(object, [b](T a) { return T(expression); });                            \
  }
HOST_FETCH(add, a + b)
HOST_FETCH(sub, a - b)
HOST_FETCH(max, max(a, b))
HOST_FETCH(min, min(a, b))
HOST_FETCH(and, a& b)
HOST_FETCH(or, a | b)
HOST_FETCH(xor, a ^ b)

// Compares bits, as the C++ standard has it.
template <class T>
inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                  host::plain<T> desired, memory_order,
                                                  memory_order) {
  bool same = false;
  const T wanted = *expected;
  const T old = host::update(object, [&](T value) {
    same = __builtin_memcmp(&value, &wanted, sizeof(T)) == 0;
    return same ? desired : value;
  });
  if (!same) *expected = old;
  return same;
}
}  // namespace metal
