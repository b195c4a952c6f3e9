// Reading and writing rows in words of 32 bits, whatever the type of their elements.
//
// A lane reads 1, 2 or 4 words at once (4, 8 or 16 bytes): wide loads are what keeps memory busy.
// The words are unpacked to float in registers; bfloat16 is the upper half of a float's bits, so its
// unpacking is a shift and a mask.

template <int W>
METAL_FUNC void load_words(const device uint* from, thread uint* to);

template <>
METAL_FUNC void load_words<1>(const device uint* from, thread uint* to) {
  to[0] = from[0];
}

template <>
METAL_FUNC void load_words<2>(const device uint* from, thread uint* to) {
  const uint2 v = *(const device uint2*)from;
  to[0] = v.x;
  to[1] = v.y;
}

template <>
METAL_FUNC void load_words<4>(const device uint* from, thread uint* to) {
  const uint4 v = *(const device uint4*)from;
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}

template <int W>
METAL_FUNC void store_words(device uint* to, const thread uint* from);

template <>
METAL_FUNC void store_words<1>(device uint* to, const thread uint* from) {
  to[0] = from[0];
}

template <>
METAL_FUNC void store_words<2>(device uint* to, const thread uint* from) {
  *(device uint2*)to = uint2(from[0], from[1]);
}

template <>
METAL_FUNC void store_words<4>(device uint* to, const thread uint* from) {
  *(device uint4*)to = uint4(from[0], from[1], from[2], from[3]);
}

// The elements of type T that one word holds, as floats: one float, or two of 16 bits.
template <typename T>
METAL_FUNC void unpack(uint word, thread float* to);

template <>
METAL_FUNC void unpack<float>(uint word, thread float* to) {
  to[0] = as_type<float>(word);
}

template <>
METAL_FUNC void unpack<float16_t>(uint word, thread float* to) {
  to[0] = float(as_type<float16_t>(ushort(word & 0xffffu)));
  to[1] = float(as_type<float16_t>(ushort(word >> 16)));
}

template <>
METAL_FUNC void unpack<bfloat16_t>(uint word, thread float* to) {
  to[0] = as_type<float>(word << 16);
  to[1] = as_type<float>(word & 0xffff0000u);
}

// The inverse: elements, rounded to type T, in one word.
template <typename T>
METAL_FUNC uint pack(const thread float* from);

template <>
METAL_FUNC uint pack<float>(const thread float* from) {
  return as_type<uint>(from[0]);
}

template <>
METAL_FUNC uint pack<float16_t>(const thread float* from) {
  return uint(as_type<ushort>(float16_t(from[0]))) |
      (uint(as_type<ushort>(float16_t(from[1]))) << 16);
}

template <>
METAL_FUNC uint pack<bfloat16_t>(const thread float* from) {
  return uint(as_type<ushort>(bfloat16_t(from[0]))) |
      (uint(as_type<ushort>(bfloat16_t(from[1]))) << 16);
}

// VEC elements as floats, and back: 4, in one load of sizeof(T) words, or 1.
template <typename T, int VEC>
METAL_FUNC void load_run(const device T* from, thread float* to) {
  if (VEC == 1) {
    to[0] = float(from[0]);
    return;
  }
  constexpr int WORDS = int(sizeof(T));
  thread uint words[WORDS];
  load_words<WORDS>((const device uint*)from, words);
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    unpack<T>(words[w], to + w * 4 / WORDS);
  }
}

template <typename T, int VEC>
METAL_FUNC void store_run(device T* to, const thread float* from) {
  if (VEC == 1) {
    to[0] = T(from[0]);
    return;
  }
  constexpr int WORDS = int(sizeof(T));
  thread uint words[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    words[w] = pack<T>(from + w * 4 / WORDS);
  }
  store_words<WORDS>((device uint*)to, words);
}
