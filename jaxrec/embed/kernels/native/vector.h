// Vectors of float of the width that the including file chose, and rows of 16-bit types read and
// written through them. Included once per instruction set, inside `namespace JAXREC_ISA`, so that
// the linker can never hand one instruction set's code to another: for the same reason nothing here
// uses the standard library.

constexpr int kWidth = JAXREC_VECTOR_BYTES / 4;

typedef float Vec __attribute__((vector_size(JAXREC_VECTOR_BYTES)));
typedef float UnalignedVec __attribute__((vector_size(JAXREC_VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(JAXREC_VECTOR_BYTES)));
typedef int32_t Mask __attribute__((vector_size(JAXREC_VECTOR_BYTES)));
typedef uint16_t Half __attribute__((vector_size(JAXREC_VECTOR_BYTES / 2)));
typedef uint16_t UnalignedHalf
    __attribute__((vector_size(JAXREC_VECTOR_BYTES / 2), aligned(2), may_alias));

#define JAXREC_INLINE static inline __attribute__((always_inline))
#define JAXREC_MEMBER inline __attribute__((always_inline))
#define JAXREC_ALWAYS __attribute__((always_inline))

// How many elements of a vector are meant: all, or the first few at the end of a row.
struct Whole {};
struct Part {
  int count;
};

JAXREC_INLINE Vec splat(float x) { return x - Vec{}; }
JAXREC_INLINE Bits splat_bits(uint32_t x) { return x - Bits{}; }
JAXREC_INLINE Bits as_bits(Vec x) { return reinterpret_cast<Bits>(x); }
JAXREC_INLINE Vec as_floats(Bits x) { return reinterpret_cast<Vec>(x); }
JAXREC_INLINE Vec select(Mask mask, Vec yes, Vec no) {
  return as_floats((reinterpret_cast<Bits>(mask) & as_bits(yes)) |
                   (~reinterpret_cast<Bits>(mask) & as_bits(no)));
}
JAXREC_INLINE Vec minimum(Vec a, Vec b) { return select(a < b, a, b); }
JAXREC_INLINE Vec maximum(Vec a, Vec b) { return select(a > b, a, b); }

JAXREC_INLINE Vec square_root(Vec x) {
#if JAXREC_VECTOR_BYTES == 64
  return (Vec)_mm512_sqrt_ps((__m512)x);
#elif JAXREC_VECTOR_BYTES == 32
  return (Vec)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (Vec)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
  return (Vec)vsqrtq_f32((float32x4_t)x);
#else
  for (int i = 0; i < kWidth; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// The sum of a vector's elements, in halves: the first half to the second until one is left.
typedef float Vec4 __attribute__((vector_size(16)));
JAXREC_INLINE float total4(Vec4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
#if JAXREC_VECTOR_BYTES == 64
JAXREC_INLINE float total(Vec x) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x),
                              _mm512_extractf32x8_ps((__m512)x, 1));
  return total4((Vec4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#elif JAXREC_VECTOR_BYTES == 32
JAXREC_INLINE float total(Vec x) {
  __m256 half = (__m256)x;
  return total4((Vec4)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#else
JAXREC_INLINE float total(Vec x) { return total4(x); }
#endif

// Types of table rows and of gradients.
struct F32 {
  typedef float Storage;
  static constexpr int kDroppedBits = 0;
};
struct BF16 {
  typedef uint16_t Storage;
  static constexpr int kDroppedBits = 16;
};
struct F16 {
  typedef uint16_t Storage;
  static constexpr int kDroppedBits = 13;
};

JAXREC_INLINE Vec widen(BF16, Half x) {
  return as_floats(__builtin_convertvector(x, Bits) << 16);
}

// Rounds to nearest, ties to even; a NaN stays one.
JAXREC_INLINE Half narrow(BF16, Vec x) {
  Bits bits = as_bits(x);
  Bits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  Bits nan = (bits >> 16) | 0x40;
  Bits is_nan = reinterpret_cast<Bits>(x != x);
  return __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), Half);
}

#if defined(JAXREC_F16C) && JAXREC_VECTOR_BYTES == 64
JAXREC_INLINE Vec widen(F16, Half x) { return (Vec)_mm512_cvtph_ps((__m256i)x); }
JAXREC_INLINE Half narrow(F16, Vec x) {
  return (Half)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(JAXREC_F16C) && JAXREC_VECTOR_BYTES == 32
JAXREC_INLINE Vec widen(F16, Half x) { return (Vec)_mm256_cvtph_ps((__m128i)x); }
JAXREC_INLINE Half narrow(F16, Vec x) {
  return (Half)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__aarch64__)
JAXREC_INLINE Vec widen(F16, Half x) { return (Vec)vcvt_f32_f16((float16x4_t)x); }
JAXREC_INLINE Half narrow(F16, Vec x) { return (Half)vcvt_f16_f32((float32x4_t)x); }
#else
JAXREC_INLINE Vec widen(F16, Half x) {
  Bits bits = __builtin_convertvector(x, Bits);
  Bits sign = (bits & 0x8000) << 16, exponent = bits & 0x7C00, rest = bits & 0x7FFF;
  Bits normal = (rest << 13) + (112u << 23);
  Bits special = (rest << 13) | 0x7F800000;
  // Through an integer, since threads may treat subnormal floats as zeros.
  Bits subnormal = as_bits(__builtin_convertvector(reinterpret_cast<Mask>(rest), Vec) * 0x1p-24f);
  Bits is_special = reinterpret_cast<Bits>(exponent == 0x7C00);
  Bits is_subnormal = reinterpret_cast<Bits>(exponent == 0);
  Bits value = (is_special & special) | (is_subnormal & subnormal) |
               (~(is_special | is_subnormal) & normal);
  return as_floats(value | sign);
}
JAXREC_INLINE Half narrow(F16, Vec x) {
  Bits bits = as_bits(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7FFFFFFF;
  Bits normal = (size - (112u << 23) + 0xFFF + ((size >> 13) & 1)) >> 13;
  // Below 2^-14 the grid is 2^-24: adding 0.5 leaves just these bits in the fraction.
  Bits subnormal = as_bits(as_floats(size) + 0.5f) - 0x3F000000;
  Bits special = 0x7C00 | (reinterpret_cast<Bits>(size > 0x7F800000) & 0x200);
  Bits is_special = reinterpret_cast<Bits>(size >= 0x477FF000);
  Bits is_subnormal = reinterpret_cast<Bits>(size < 0x38800000);
  Bits value = (is_special & special) | (is_subnormal & ~is_special & subnormal) |
               (~(is_special | is_subnormal) & normal);
  return __builtin_convertvector(value | sign, Half);
}
#endif

JAXREC_INLINE Vec load(F32, const float* from, Whole) {
  return *reinterpret_cast<const UnalignedVec*>(from);
}
JAXREC_INLINE void store(F32, float* to, Vec x, Whole) {
  *reinterpret_cast<UnalignedVec*>(to) = x;
}
JAXREC_INLINE Half load_half(const uint16_t* from, Whole) {
  return *reinterpret_cast<const UnalignedHalf*>(from);
}
JAXREC_INLINE void store_half(uint16_t* to, Half x, Whole) {
  *reinterpret_cast<UnalignedHalf*>(to) = x;
}

// Loads and stores of the first elements of a vector. Copied one by one, elements meet in memory, and
// the wide load of them waits for the narrow stores. A masked access as wide as the vector waits for
// the cache line behind the row. So a part is cut into halves and quarters, with a mask for the last
// one to three elements.
#if JAXREC_VECTOR_BYTES >= 32
JAXREC_INLINE __m128i lanes_of(int count) {
  static const int32_t lanes[8] = {-1, -1, -1, -1};
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes + 4 - count));
}

// The first `count` of 4 or 8 floats, at least one; the other elements are 0.
JAXREC_INLINE __m128 load4(const float* from, int count) {
  return count == 4 ? _mm_loadu_ps(from) : _mm_maskload_ps(from, lanes_of(count));
}
JAXREC_INLINE __m256 load8(const float* from, int count) {
  if (count <= 4) return _mm256_insertf128_ps(_mm256_setzero_ps(), load4(from, count), 0);
  if (count == 8) return _mm256_loadu_ps(from);
  __m256 first = _mm256_castps128_ps256(_mm_loadu_ps(from));
  return _mm256_insertf128_ps(first, load4(from + 4, count - 4), 1);
}

// Stores the first `count` elements; `rest` begins with the next one to store.
JAXREC_INLINE void store4(float* to, __m128 rest, int count) {
  if (count == 4) return _mm_storeu_ps(to, rest);
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(to), rest);
    rest = _mm_movehl_ps(rest, rest);
    to += 2;
  }
  if (count & 1) _mm_store_ss(to, rest);
}
JAXREC_INLINE void store8(float* to, __m256 rest, int count) {
  if (count == 8) return _mm256_storeu_ps(to, rest);
  __m128 last = _mm256_castps256_ps128(rest);
  if (count > 4) {
    _mm_storeu_ps(to, last);
    last = _mm256_extractf128_ps(rest, 1);
    to += 4;
    count -= 4;
  }
  store4(to, last, count);
}
#endif

#if JAXREC_VECTOR_BYTES == 64
JAXREC_INLINE Vec load(F32, const float* from, Part part) {
  if (part.count <= 8) {
    return (Vec)_mm512_insertf32x8(_mm512_setzero_ps(), load8(from, part.count), 0);
  }
  __m512 first = _mm512_castps256_ps512(_mm256_loadu_ps(from));
  return (Vec)_mm512_insertf32x8(first, load8(from + 8, part.count - 8), 1);
}
JAXREC_INLINE void store(F32, float* to, Vec x, Part part) {
  __m256 last = _mm512_castps512_ps256((__m512)x);
  if (part.count <= 8) return store8(to, last, part.count);
  _mm256_storeu_ps(to, last);
  store8(to + 8, _mm512_extractf32x8_ps((__m512)x, 1), part.count - 8);
}
JAXREC_INLINE __mmask8 mask_of(int count) { return static_cast<__mmask8>((1u << count) - 1); }
JAXREC_INLINE Half load_half(const uint16_t* from, Part part) {
  if (part.count <= 8) {
    __m128i first = _mm_maskz_loadu_epi16(mask_of(part.count), from);
    return (Half)_mm256_inserti128_si256(_mm256_setzero_si256(), first, 0);
  }
  __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  __m128i last = _mm_maskz_loadu_epi16(mask_of(part.count - 8), from + 8);
  return (Half)_mm256_inserti128_si256(_mm256_castsi128_si256(first), last, 1);
}
JAXREC_INLINE void store_half(uint16_t* to, Half x, Part part) {
  __m128i last = _mm256_castsi256_si128((__m256i)x);
  if (part.count > 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), last);
    last = _mm256_extracti128_si256((__m256i)x, 1);
    to += 8;
    part.count -= 8;
  }
  _mm_mask_storeu_epi16(to, mask_of(part.count), last);
}
#elif JAXREC_VECTOR_BYTES == 32
JAXREC_INLINE Vec load(F32, const float* from, Part part) { return (Vec)load8(from, part.count); }
JAXREC_INLINE void store(F32, float* to, Vec x, Part part) { store8(to, (__m256)x, part.count); }
#else
JAXREC_INLINE Vec load(F32, const float* from, Part part) {
  Vec x = {};
  for (int i = 0; i < part.count; ++i) x[i] = from[i];
  return x;
}
JAXREC_INLINE void store(F32, float* to, Vec x, Part part) {
  for (int i = 0; i < part.count; ++i) to[i] = x[i];
}
#endif

#if JAXREC_VECTOR_BYTES < 64
JAXREC_INLINE Half load_half(const uint16_t* from, Part part) {
  uint64_t words[sizeof(Half) / 8] = {};
  for (int i = 0; i < part.count; ++i) {
    words[i / 4] |= static_cast<uint64_t>(from[i]) << (16 * (i % 4));
  }
  Half x;
  __builtin_memcpy(&x, words, sizeof x);
  return x;
}
JAXREC_INLINE void store_half(uint16_t* to, Half x, Part part) {
  for (int i = 0; i < part.count; ++i) to[i] = x[i];
}
#endif

template <class T, class Extent>
JAXREC_INLINE Vec load(T type, const uint16_t* from, Extent extent) {
  return widen(type, load_half(from, extent));
}
template <class T, class Extent>
JAXREC_INLINE void store(T type, uint16_t* to, Vec x, Extent extent) {
  store_half(to, narrow(type, x), extent);
}

// Calls body(first column, Whole or Part) for each vector of a row.
template <class Body>
JAXREC_INLINE void for_each_vector(int64_t dim, const Body& body) {
  int64_t column = 0;
  for (; column + kWidth <= dim; column += kWidth) body(column, Whole{});
  if (column < dim) body(column, Part{static_cast<int>(dim - column)});
}

// Copies a row bit for bit.
JAXREC_INLINE void copy(F32, float* to, const float* from, int64_t dim) {
  for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
    store(F32{}, to + column, load(F32{}, from + column, extent), extent);
  });
}
template <class T>
JAXREC_INLINE void copy(T, uint16_t* to, const uint16_t* from, int64_t dim) {
  for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
    store_half(to + column, load_half(from + column, extent), extent);
  });
}

constexpr int kLine = 64;

// The lines of a row are asked for in their order: GCC changes it, and loses a tenth of the time.
JAXREC_INLINE void prefetch_line(const void* address) {
  __builtin_prefetch(address, 0, 2);  // Into the second-level cache.
  asm volatile("");
}
JAXREC_INLINE void prefetch_line_into_first_level(const void* address) {
  __builtin_prefetch(address, 0, 3);
  asm volatile("");
}

// Asks for a line that will be written, so that no other core has it by then. With AVX-512 this is
// PREFETCHW; AVX2 alone does not promise that instruction, and gets the one for reading.
JAXREC_INLINE void prefetch_line_to_write(const void* address) {
  __builtin_prefetch(address, 1, 2);
  asm volatile("");
}

template <class Ask>
JAXREC_INLINE void for_each_line(const void* address, int64_t bytes, const Ask& ask) {
  const char* from = static_cast<const char*>(address);
  for (int64_t i = 0; i < bytes; i += kLine) ask(from + i);
  // A row whose size is not a multiple of a line may end one line later.
  if (bytes % kLine != 0) ask(from + bytes - 1);
}

// Asks for the `bytes` at `address`, to read them,
JAXREC_INLINE void prefetch(const void* address, int64_t bytes, bool into_first_level = false) {
  if (into_first_level) {
    for_each_line(address, bytes,
                  [](const void* line) JAXREC_ALWAYS { prefetch_line_into_first_level(line); });
  } else {
    for_each_line(address, bytes, [](const void* line) JAXREC_ALWAYS { prefetch_line(line); });
  }
}

// and to write them.
JAXREC_INLINE void prefetch_to_write(const void* address, int64_t bytes) {
  for_each_line(address, bytes,
                [](const void* line) JAXREC_ALWAYS { prefetch_line_to_write(line); });
}
