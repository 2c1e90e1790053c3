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

// How an element is changed before it is added.
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
    // Both comparisons with a NaN are false, so that a NaN stays a NaN.
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

// Sums in a register, of fewer columns than a vector has.
struct RegisterPart {
  Vec sum;
  Part part;

  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  JAXREC_MEMBER void clear(int64_t dim) {
    sum = Vec{};
    part.count = static_cast<int>(dim);
  }
  template <class T, class Change>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, const Change& change, int64_t) {
    sum += change(load(type, row, part));
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t) const {
    store_as(type, out, 0, sum * scale, part);
  }
  JAXREC_MEMBER void keep(float* out, int64_t) const { store(F32{}, out, sum, Whole{}); }
};

// Ways to sum rows. A panel is some columns that are summed over all rows before the next columns
// are. each_panel calls work(first column, sums) for each panel; one way has all columns in one,
template <class Sums>
struct AtOnce {
  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return Sums::fixed(dim); }
  template <class Work>
  JAXREC_MEMBER static void each_panel(int64_t, const Work& work) {
    Sums sums;  // Here, so that they stay in registers.
    work(int64_t{0}, sums);
  }
};

// the other, for rows of any length, as many as fit into registers. It reads the ids once a panel;
// one walk with the sums in the first-level cache took longer.
struct InPanels {
  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  template <class Work>
  JAXREC_MEMBER static void each_panel(int64_t dim, const Work& work) {
    int64_t column = 0;
    while (sum_vectors<8>(dim, column, work)) {
    }
    sum_vectors<4>(dim, column, work);
    sum_vectors<2>(dim, column, work);
    sum_vectors<1>(dim, column, work);
    if (column < dim) {
      RegisterPart sums;
      work(column, sums);
    }
  }

 private:
  template <int kVectors, class Work>
  JAXREC_MEMBER static bool sum_vectors(int64_t dim, int64_t& column, const Work& work) {
    if (column + kVectors * kWidth > dim) return false;
    Registers<kVectors> sums;
    work(column, sums);
    column += kVectors * kWidth;
    return true;
  }
};

// A type as a value.
template <class T>
struct Of {
  typedef T Type;
};

// Calls work(Of<AtOnce<...>> or Of<InPanels>), the way in which rows of `dim` elements are summed.
template <class Work>
JAXREC_INLINE void with_panels(int64_t dim, const Work& work) {
  switch (dim) {
    case 16: return work(Of<AtOnce<Registers<16 / kWidth>>>{});
    case 32: return work(Of<AtOnce<Registers<32 / kWidth>>>{});
    case 64: return work(Of<AtOnce<Registers<64 / kWidth>>>{});
#if JAXREC_VECTOR_BYTES >= 32
    case 128: return work(Of<AtOnce<Registers<128 / kWidth>>>{});
#endif
#if JAXREC_VECTOR_BYTES >= 64
    case 256: return work(Of<AtOnce<Registers<256 / kWidth>>>{});
#endif
  }
  if (dim < kWidth) return work(Of<AtOnce<RegisterPart>>{});
  return work(Of<InPanels>{});
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
