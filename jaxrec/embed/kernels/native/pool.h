// Pooled lookup of a block of bags. Included once per instruction set, after vector.h.

// Rows are asked for this many bytes (in whole rows) before they are needed.
#ifndef JAXREC_AHEAD
#define JAXREC_AHEAD 4096
#endif
constexpr int64_t kBytesAhead = JAXREC_AHEAD;
constexpr int64_t kMostRowsAhead = 64;

JAXREC_INLINE int64_t rows_ahead(int64_t row_bytes) {
  int64_t rows = kBytesAhead / row_bytes;
  return rows < 2 ? 2 : rows > kMostRowsAhead ? kMostRowsAhead : rows;
}

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

// Sums in registers: rows of `kVectors` whole vectors.
template <int kVectors>
struct Registers {
  Vec sums[kVectors];
  JAXREC_MEMBER int64_t dim(int64_t) const { return kVectors * kWidth; }
  JAXREC_MEMBER void clear(int64_t) {
    for (int i = 0; i < kVectors; ++i) sums[i] = Vec{};
  }
  template <class T>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, int64_t) {
    for (int i = 0; i < kVectors; ++i) sums[i] += load(type, row + i * kWidth, Whole{});
  }
  template <class T>
  JAXREC_MEMBER void add_scaled(T type, const typename T::Storage* row, float scale, int64_t) {
    for (int i = 0; i < kVectors; ++i) sums[i] += scale * load(type, row + i * kWidth, Whole{});
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t) {
    for (int i = 0; i < kVectors; ++i) store_as(type, out, i * kWidth, sums[i] * scale, Whole{});
  }
};

// Sums in the first-level cache: rows of any length up to kMaxDim.
struct Memory {
  alignas(64) float sums[kMaxDim];
  JAXREC_MEMBER int64_t dim(int64_t dim) const { return dim; }
  JAXREC_MEMBER void clear(int64_t dim) {
    for (int64_t i = 0; i < dim; i += kWidth) store(F32{}, sums + i, Vec{}, Whole{});
  }
  template <class T>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, int64_t dim) {
    for_each_vector(dim, [&](int64_t column, auto extent) {
      Vec sum = load(F32{}, sums + column, Whole{}) + load(type, row + column, extent);
      store(F32{}, sums + column, sum, Whole{});
    });
  }
  template <class T>
  JAXREC_MEMBER void add_scaled(T type, const typename T::Storage* row, float scale,
                                       int64_t dim) {
    for_each_vector(dim, [&](int64_t column, auto extent) {
      Vec sum = load(F32{}, sums + column, Whole{}) + scale * load(type, row + column, extent);
      store(F32{}, sums + column, sum, Whole{});
    });
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t dim) {
    for_each_vector(dim, [&](int64_t column, auto extent) {
      store_as(type, out, column, load(F32{}, sums + column, Whole{}) * scale, extent);
    });
  }
};

template <class T, class Sums, bool kWeighted>
void pool_bags(const PooledBlock& block) {
  typedef typename T::Storage Storage;
  const Storage* table = static_cast<const Storage*>(block.table.rows);
  const uint32_t num_rows = static_cast<uint32_t>(block.table.num_rows);
  Sums sums;
  const int64_t dim = sums.dim(block.table.dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Storage));
  const int64_t ahead = rows_ahead(row_bytes);
  const int64_t out_bytes = block.out_stride * size_of(block.out_type);
  char* out = static_cast<char*>(block.out);

  auto ask = [&](int64_t position) {
    uint32_t id = static_cast<uint32_t>(block.ids[position]);
    prefetch<0>(table + (id < num_rows ? id : 0) * dim, row_bytes);
  };
  for (int64_t i = 0; i < ahead && i < block.num_ids; ++i) ask(i);

  int64_t position = 0;
  for (int64_t bag = 0; bag < block.num_bags; ++bag, out += out_bytes) {
    int64_t length = block.lengths[bag] < 0 ? 0 : block.lengths[bag];
    int64_t end = position + length;
    if (end > block.num_ids) end = block.num_ids;
    bool outside = false;
    sums.clear(dim);
    for (; position < end; ++position) {
      if (position + ahead < block.num_ids) ask(position + ahead);
      uint32_t id = static_cast<uint32_t>(block.ids[position]);
      if (__builtin_expect(id >= num_rows, 0)) {
        outside = true;
        continue;
      }
      if (kWeighted) {
        sums.add_scaled(T{}, table + id * dim, block.weights[position], dim);
      } else {
        sums.add(T{}, table + id * dim, dim);
      }
    }
    float scale = block.mean && length > 1 ? 1.0f / static_cast<float>(length) : 1.0f;
    sums.put(block.out_type, out, outside ? __builtin_nanf("") : scale, dim);
  }
}

template <class T, class Sums>
void pool_weighted_or_not(const PooledBlock& block) {
  if (block.weights != nullptr) {
    pool_bags<T, Sums, true>(block);
  } else {
    pool_bags<T, Sums, false>(block);
  }
}

template <class T>
void pool_dim(const PooledBlock& block) {
  switch (block.table.dim) {
    case 16: return pool_weighted_or_not<T, Registers<16 / kWidth>>(block);
    case 32: return pool_weighted_or_not<T, Registers<32 / kWidth>>(block);
    case 64: return pool_weighted_or_not<T, Registers<64 / kWidth>>(block);
#if JAXREC_VECTOR_BYTES >= 32
    case 128: return pool_weighted_or_not<T, Registers<128 / kWidth>>(block);
#endif
    default: return pool_weighted_or_not<T, Memory>(block);
  }
}

void pool(const PooledBlock& block) {
  switch (block.table.type) {
    case Type::kF32: return pool_dim<F32>(block);
    case Type::kBF16: return pool_dim<BF16>(block);
    case Type::kF16: return pool_dim<F16>(block);
  }
}
