// Sums of rows. Included once per instruction set, after vector.h.

template <class Extent>
JAXREC_INLINE void store_as(Type type, void* row, int64_t column, Vec x, Extent extent) {
  switch (type) {
    case Type::kF32:
      return store(F32{}, static_cast<float*>(row) + column, x, extent);
    case Type::kBF16:
      return store(BF16{}, static_cast<uint16_t*>(row) + column, x, extent);
    case Type::kF16:
      return store(F16{}, static_cast<uint16_t*>(row) + column, x, extent);
  }
}

// What becomes of an element before it is added.
struct AsIs {
  JAXREC_MEMBER Vec operator()(Vec x) const { return x; }
};
struct Scaled {
  float scale;
  JAXREC_MEMBER Vec operator()(Vec x) const { return x * scale; }
};
struct ClippedAndScaled {
  float bound, scale;
  JAXREC_MEMBER Vec operator()(Vec x) const {
    // In this form a NaN stays one.
    x = select(x > bound, splat(bound), x);
    x = select(x < -bound, splat(-bound), x);
    return x * scale;
  }
};

// Sums in registers, for rows of `kVectors` whole vectors.
template <int kVectors>
struct Registers {
  Vec sums[kVectors];

  JAXREC_MEMBER static int64_t fixed(int64_t) { return kVectors * kWidth; }
  JAXREC_MEMBER void clear(int64_t) {
    for (int i = 0; i < kVectors; ++i) sums[i] = Vec{};
  }
  template <class T, class Change>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, const Change& change, int64_t) {
    for (int i = 0; i < kVectors; ++i) sums[i] += change(load(type, row + i * kWidth, Whole{}));
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t) const {
    for (int i = 0; i < kVectors; ++i) store_as(type, out, i * kWidth, sums[i] * scale, Whole{});
  }
  // Writes whole vectors.
  JAXREC_MEMBER void keep(float* out, int64_t) const {
    for (int i = 0; i < kVectors; ++i) store(F32{}, out + i * kWidth, sums[i], Whole{});
  }
};

// Sums in registers, for rows of `kVectors` vectors of which the last may be a part.
template <int kVectors>
struct RegistersAndPart {
  static constexpr int kLast = (kVectors - 1) * kWidth;
  Vec sums[kVectors];
  Part part;

  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  JAXREC_MEMBER void clear(int64_t dim) {
    for (int i = 0; i < kVectors; ++i) sums[i] = Vec{};
    part.count = static_cast<int>(dim) - kLast;
  }
  template <class T, class Change>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, const Change& change, int64_t) {
    for (int i = 0; i < kVectors - 1; ++i) sums[i] += change(load(type, row + i * kWidth, Whole{}));
    sums[kVectors - 1] += change(load(type, row + kLast, part));
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t) const {
    for (int i = 0; i < kVectors - 1; ++i) {
      store_as(type, out, i * kWidth, sums[i] * scale, Whole{});
    }
    store_as(type, out, kLast, sums[kVectors - 1] * scale, part);
  }
  JAXREC_MEMBER void keep(float* out, int64_t) const {
    for (int i = 0; i < kVectors; ++i) store(F32{}, out + i * kWidth, sums[i], Whole{});
  }
};

// Sums in the first-level cache, for rows of any length up to kMaxDim.
struct Memory {
  alignas(64) float sums[kMaxDim];

  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  JAXREC_MEMBER void clear(int64_t dim) {
    for (int64_t i = 0; i < dim; i += kWidth) store(F32{}, sums + i, Vec{}, Whole{});
  }
  template <class T, class Change>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, const Change& change,
                         int64_t dim) {
    for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      Vec x = change(load(type, row + column, extent));
      store(F32{}, sums + column, load(F32{}, sums + column, Whole{}) + x, Whole{});
    });
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t dim) const {
    for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      store_as(type, out, column, load(F32{}, sums + column, Whole{}) * scale, extent);
    });
  }
  JAXREC_MEMBER void keep(float* out, int64_t dim) const {
    for (int64_t i = 0; i < dim; i += kWidth) {
      store(F32{}, out + i, load(F32{}, sums + i, Whole{}), Whole{});
    }
  }
};

// A type as a value.
template <class T>
struct Of {
  typedef T Type;
};

// Calls work(Of<Sums>) with the place where rows of `dim` elements are summed fastest.
template <class Work>
JAXREC_INLINE void with_sums(int64_t dim, const Work& work) {
  switch (dim) {
    case 16: return work(Of<Registers<16 / kWidth>>{});
    case 32: return work(Of<Registers<32 / kWidth>>{});
    case 64: return work(Of<Registers<64 / kWidth>>{});
#if JAXREC_VECTOR_BYTES >= 32
    case 128: return work(Of<Registers<128 / kWidth>>{});
#endif
#if JAXREC_VECTOR_BYTES >= 64
    case 256: return work(Of<Registers<256 / kWidth>>{});
#endif
  }
#if JAXREC_VECTOR_BYTES >= 32
  if (dim <= kWidth) return work(Of<RegistersAndPart<1>>{});
  if (dim <= 2 * kWidth) return work(Of<RegistersAndPart<2>>{});
#endif
  return work(Of<Memory>{});
}

// Calls work(F32 or BF16 or F16).
template <class Work>
JAXREC_INLINE void with_type(Type type, const Work& work) {
  switch (type) {
    case Type::kF32: return work(F32{});
    case Type::kBF16: return work(BF16{});
    case Type::kF16: return work(F16{});
  }
}
