// Codes of packed rows as floats. Included once per instruction set, after sums.h.
//
// A byte holds the codes of `kPlanes` neighbouring columns, the first in its lowest bits. Codes are
// taken apart by planes: plane p of a vector of bytes has the columns p, p + kPlanes and so on.
// Planes are interleaved when a result is stored, once a bag.

typedef int32_t Lanes __attribute__((vector_size(JAXREC_VECTOR_BYTES)));

// Each byte in a lane of 32 bits.
#if JAXREC_VECTOR_BYTES == 64
JAXREC_INLINE Bits load_bytes(const uint8_t* from, Whole) {
  return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
JAXREC_INLINE Bits load_bytes(const uint8_t* from, Part part) {
  const __mmask16 mask = static_cast<__mmask16>((1u << part.count) - 1);
  return (Bits)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from));
}
#else
JAXREC_INLINE Bits load_bytes(const uint8_t* from, Whole) {
#if JAXREC_VECTOR_BYTES == 32
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(JAXREC_VECTOR_BYTES / 4), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Bits);
#endif
}
JAXREC_INLINE Bits load_bytes(const uint8_t* from, Part part) {
  Bits x = {};
  for (int i = 0; i < part.count; ++i) x[i] = from[i];
  return x;
}
#endif

JAXREC_INLINE Vec as_numbers(Bits x) {
  return __builtin_convertvector(reinterpret_cast<Lanes>(x), Vec);
}

// a[0], b[0], a[1], b[1] and so on: the first half, then the second.
JAXREC_INLINE void interleave(Vec& a, Vec& b) {
#if JAXREC_VECTOR_BYTES == 64
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = _mm512_permutex2var_ps((__m512)a, low, (__m512)b);
  b = (Vec)_mm512_permutex2var_ps((__m512)a, high, (__m512)b);
  a = (Vec)first;
#elif JAXREC_VECTOR_BYTES == 32
  const __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b);
  const __m256 high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  a = (Vec)_mm256_permute2f128_ps(low, high, 0x20);
  b = (Vec)_mm256_permute2f128_ps(low, high, 0x31);
#elif defined(__SSE2__)
  const __m128 low = _mm_unpacklo_ps((__m128)a, (__m128)b);
  b = (Vec)_mm_unpackhi_ps((__m128)a, (__m128)b);
  a = (Vec)low;
#else
  const Vec x = a, y = b;
  for (int i = 0; i < kWidth / 2; ++i) {
    a[2 * i] = x[i];
    a[2 * i + 1] = y[i];
    b[2 * i] = x[kWidth / 2 + i];
    b[2 * i + 1] = y[kWidth / 2 + i];
  }
#endif
}

// Planes in the order of their columns.
JAXREC_INLINE void interleave_planes(Vec (&)[1]) {}
JAXREC_INLINE void interleave_planes(Vec (&planes)[2]) { interleave(planes[0], planes[1]); }
JAXREC_INLINE void interleave_planes(Vec (&planes)[4]) {
  interleave(planes[0], planes[2]);
  interleave(planes[1], planes[3]);
  interleave(planes[0], planes[1]);
  interleave(planes[2], planes[3]);
}

// Codes of `kBits` bits behind a float16 scale and a float16 offset.
template <int kBits>
struct Integers {
  static constexpr int kPlanes = 8 / kBits;
  static constexpr int64_t kHeader = 4;  // HEADER_BYTES of integers.py.
  static constexpr int64_t kTrailer = 0;

  // A row and what its codes stand for, times a weight.
  struct Row {
    const uint8_t* bytes;
    Vec scale, offset;
    Vec values;  // Of all codes, where they are looked up.

    JAXREC_MEMBER Row(const uint8_t* row, float weight, int64_t) : bytes(row + kHeader) {
      float factor, summand;
      read_header(row, factor, summand);
      scale = splat(factor * weight);
      offset = splat(summand * weight);
#if JAXREC_VECTOR_BYTES == 64
      values = codes() * scale + offset;
#endif
    }

    JAXREC_MEMBER Vec value(Bits bytes, int plane) const {
#if JAXREC_VECTOR_BYTES == 64
      if (kBits < 8) {
        // The lowest four bits of each lane are its index.
        const __m512i index = (__m512i)(bytes >> static_cast<uint32_t>(plane * kBits));
        return (Vec)_mm512_permutexvar_ps(index, (__m512)values);
      }
#endif
      Bits codes = bytes >> static_cast<uint32_t>(plane * kBits);
      if (plane + 1 < kPlanes) codes &= static_cast<uint32_t>((1 << kBits) - 1);
      return as_numbers(codes) * scale + offset;
    }
  };

 private:
  JAXREC_MEMBER static void read_header(const uint8_t* row, float& scale, float& offset) {
    uint32_t bits;
    __builtin_memcpy(&bits, row, 4);
#if defined(JAXREC_F16C)
    const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits)));
    scale = pair[0];
    offset = pair[1];
#else
    Half halves = {};
    halves[0] = static_cast<uint16_t>(bits);
    halves[1] = static_cast<uint16_t>(bits >> 16);
    const Vec pair = widen(F16{}, halves);
    scale = pair[0];
    offset = pair[1];
#endif
  }

  // The code of each index of a lookup.
  JAXREC_MEMBER static Vec codes() {
    Vec x = {};
    for (int i = 0; i < kWidth; ++i) x[i] = static_cast<float>(i & ((1 << kBits) - 1));
    return x;
  }
};

// A float32 behind the codes of a row.
JAXREC_INLINE float read_float(const uint8_t* from) {
  float x;
  __builtin_memcpy(&x, from, 4);
  return x;
}

// Codes of 8 bits before a float32 scale and a float32 offset: TrainedInt8Rows.
struct FusedIntegers {
  static constexpr int kPlanes = 1;
  static constexpr int64_t kHeader = 0;
  static constexpr int64_t kTrailer = 8;

  struct Row {
    const uint8_t* bytes;
    Vec scale, offset;

    JAXREC_MEMBER Row(const uint8_t* row, float weight, int64_t dim)
        : bytes(row),
          scale(splat(read_float(row + dim) * weight)),
          offset(splat(read_float(row + dim + 4) * weight)) {}

    JAXREC_MEMBER Vec value(Bits bytes, int) const { return as_numbers(bytes) * scale + offset; }
  };
};

// Floats of 1, 4 and 3 bits with an exponent bias of 7, times a weight. NaN codes do not occur.
JAXREC_INLINE Vec e4m3_times(Bits bytes, float weight) {
#if defined(JAXREC_F16C)
  // A float16 with the same fields is 2^8 times smaller, whatever its exponent.
  typedef int16_t Signed __attribute__((vector_size(JAXREC_VECTOR_BYTES / 2)));
  const Half high = __builtin_convertvector(bytes, Half) << 8;
  const Half half = reinterpret_cast<Half>(reinterpret_cast<Signed>(high) >> 1) & 0xBFFF;
  return widen(F16{}, half) * (256 * weight);
#else
  const Bits size = bytes & 0x7F, sign = (bytes & 0x80) << 24;
  // Subnormal codes count eighths above 2^-6, which is subtracted: threads may treat subnormal
  // floats as zeros.
  const Bits is_subnormal = reinterpret_cast<Bits>(size < 8);
  const Bits bits = (size << 20) + (120u << 23) + (is_subnormal & (1u << 23));
  const Vec smallest = as_floats(is_subnormal & as_bits(splat(0x1p-6f)));
  return as_floats(as_bits(as_floats(bits) - smallest) | sign) * weight;
#endif
}

// Such floats without a scale: Float8Rows.
struct Float8 {
  static constexpr int kPlanes = 1;
  static constexpr int64_t kHeader = 0;
  static constexpr int64_t kTrailer = 0;

  struct Row {
    const uint8_t* bytes;
    float weight;

    JAXREC_MEMBER Row(const uint8_t* row, float weight, int64_t) : bytes(row), weight(weight) {}

    JAXREC_MEMBER Vec value(Bits bytes, int) const { return e4m3_times(bytes, weight); }
  };
};

// Codes of 8-bit floats before a float32 scale: ScaledFloat8Rows. Floats of 1, 5 and 2 bits are the
// first bytes of float16 numbers.
template <bool kE5M2>
struct ScaledFloat8 {
  static constexpr int kPlanes = 1;
  static constexpr int64_t kHeader = 0;
  static constexpr int64_t kTrailer = 4;

  struct Row {
    const uint8_t* bytes;
    float weight;

    JAXREC_MEMBER Row(const uint8_t* row, float weight, int64_t dim)
        : bytes(row), weight(read_float(row + dim) * weight) {}

    JAXREC_MEMBER Vec value(Bits bytes, int) const {
      if (!kE5M2) return e4m3_times(bytes, weight);
      return widen(F16{}, __builtin_convertvector(bytes, Half) << 8) * weight;
    }
  };
};
