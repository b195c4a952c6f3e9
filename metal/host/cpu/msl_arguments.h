// What a kernel is called with: buffers, threadgroup memory, and the thread's own indices. Each
// object here turns into the type that the kernel's parameter asks for.
#pragma once

namespace metal_host {

struct Pointer {
  void* address;
  template <class T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};
struct Reference {
  void* address;
  template <class T>
  operator T&() const {
    return *static_cast<T*>(address);
  }
};
inline Pointer pointer_argument(unsigned index) { return {buffer_address(index)}; }
inline Reference reference_argument(unsigned index) { return {buffer_address(index)}; }
inline Pointer shared_argument(unsigned index) { return {threadgroup_argument(index)}; }

struct Index {
  unsigned value;
  template <class T>
    requires std::is_integral_v<T>
  operator T() const {
    return T(value);
  }
};
struct Index3 {
  const unsigned* value;
  template <class T>
    requires std::is_integral_v<T>
  operator T() const {
    return T(value[0]);
  }
  template <class T>
  operator metal::vec<T, 2>() const {
    return {T(value[0]), T(value[1])};
  }
  template <class T>
  operator metal::vec<T, 3>() const {
    return {T(value[0]), T(value[1]), T(value[2])};
  }
};

// The function attribute_NAME serves a parameter that is marked [[NAME]].
inline Index3 attribute_thread_position_in_grid() { return {self->position_in_grid}; }
inline Index3 attribute_thread_position_in_threadgroup() { return {self->position_in_threadgroup}; }
inline Index3 attribute_threadgroup_position_in_grid() { return {dispatch.group}; }
inline Index3 attribute_threads_per_grid() { return {dispatch.grid}; }
inline Index3 attribute_threadgroups_per_grid() { return {dispatch.groups}; }
inline Index3 attribute_threads_per_threadgroup() { return {dispatch.group_threads}; }
inline Index attribute_thread_index_in_threadgroup() { return {self->index}; }
inline Index attribute_thread_index_in_simdgroup() { return {self->lane}; }
inline Index attribute_simdgroup_index_in_threadgroup() { return {self->simdgroup}; }
inline Index attribute_thread_index_in_quadgroup() { return {self->lane % 4}; }
inline Index attribute_quadgroup_index_in_threadgroup() { return {self->index / 4}; }

// The bytes of one scalar in an array of T: threads may write neighbours without racing.
template <class T>
constexpr size_t grain = std::is_arithmetic_v<T> || sizeof(T) <= 2 ? sizeof(T) : 1;
template <class T, int N>
constexpr size_t grain<metal::vec<T, N>> = sizeof(T);

// `threadgroup T a[N];` becomes `T (&a)[N] = metal_host::Shared{id, "a"};`.
struct Shared {
  unsigned id;
  const char* name;
  template <class T>
  operator T&() const {
    return *static_cast<T*>(group_storage(id, name, sizeof(T), grain<std::remove_all_extents_t<T>>));
  }
};

}  // namespace metal_host
