// Lookups of packed rows. Included once per instruction set, after codes.h and pool.h.

template <class Codec>
JAXREC_INLINE int64_t packed_row_bytes(int64_t dim) {
  return Codec::kHeader + (dim + Codec::kPlanes - 1) / Codec::kPlanes + Codec::kTrailer;
}

// Asks for each line of a row once. Tables begin at a multiple of a line, so that rows begin at
// multiples of the largest power of two that divides their length.
template <class Codec>
JAXREC_INLINE void prefetch_packed(const uint8_t* row, int64_t dim) {
  const int64_t bytes = packed_row_bytes<Codec>(dim);
  const int64_t step = bytes & -bytes;
  const int64_t latest = step < kLine ? kLine - step : 0;  // Where in a line a row may begin.
  for (int64_t i = 0; i + kLine < latest + bytes; i += kLine) prefetch_line(row + i);
  prefetch_line(row + bytes - 1);
}

// Stores the columns of one vector of bytes, given its planes, times a scale.
template <int kPlanes>
JAXREC_INLINE void put_planes(Type type, void* out, int64_t first_byte, int64_t dim,
                              const Vec (&planes)[kPlanes], float scale) {
  Vec columns[kPlanes];
  for (int p = 0; p < kPlanes; ++p) columns[p] = planes[p];
  interleave_planes(columns);
  for (int p = 0; p < kPlanes; ++p) {
    const int64_t column = first_byte * kPlanes + p * kWidth;
    if (column + kWidth <= dim) {
      store_as(type, out, column, columns[p] * scale, Whole{});
    } else if (column < dim) {
      store_as(type, out, column, columns[p] * scale, Part{static_cast<int>(dim - column)});
    }
  }
}

// Sums in registers, for rows of `kDim` columns.
template <class Codec, int kDim>
struct PackedRegisters {
  static constexpr int kPlanes = Codec::kPlanes;
  static constexpr int kBytes = kDim / kPlanes;
  static constexpr int kVectors = (kBytes + kWidth - 1) / kWidth;
  Vec sums[kVectors][kPlanes];

  JAXREC_MEMBER static int64_t fixed(int64_t) { return kDim; }
  JAXREC_MEMBER void clear(int64_t) {
    for (int v = 0; v < kVectors; ++v) {
      for (int p = 0; p < kPlanes; ++p) sums[v][p] = Vec{};
    }
  }
  JAXREC_MEMBER void add(const typename Codec::Row& row, int64_t) {
    for (int v = 0; v < kVectors; ++v) {
      const Bits bytes = v * kWidth + kWidth <= kBytes
                             ? load_bytes(row.bytes + v * kWidth, Whole{})
                             : load_bytes(row.bytes + v * kWidth, Part{kBytes - v * kWidth});
      for (int p = 0; p < kPlanes; ++p) sums[v][p] += row.value(bytes, p);
    }
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t) const {
    for (int v = 0; v < kVectors; ++v) put_planes(type, out, v * kWidth, kDim, sums[v], scale);
  }
};

// Sums in the first-level cache, for rows of any length up to kMaxDim.
template <class Codec>
struct PackedMemory {
  static constexpr int kPlanes = Codec::kPlanes;
  alignas(64) float sums[kPlanes][kMaxDim / kPlanes];

  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  JAXREC_MEMBER static int64_t num_bytes(int64_t dim) { return (dim + kPlanes - 1) / kPlanes; }
  JAXREC_MEMBER void clear(int64_t dim) {
    for (int64_t i = 0; i < num_bytes(dim); i += kWidth) {
      for (int p = 0; p < kPlanes; ++p) store(F32{}, sums[p] + i, Vec{}, Whole{});
    }
  }
  JAXREC_MEMBER void add(const typename Codec::Row& row, int64_t dim) {
    for_each_vector(num_bytes(dim), [&](int64_t i, auto extent) JAXREC_ALWAYS {
      const Bits bytes = load_bytes(row.bytes + i, extent);
      for (int p = 0; p < kPlanes; ++p) {
        const Vec x = load(F32{}, sums[p] + i, Whole{}) + row.value(bytes, p);
        store(F32{}, sums[p] + i, x, Whole{});
      }
    });
  }
  JAXREC_MEMBER void put(Type type, void* out, float scale, int64_t dim) const {
    for (int64_t i = 0; i < num_bytes(dim); i += kWidth) {
      Vec planes[kPlanes];
      for (int p = 0; p < kPlanes; ++p) planes[p] = load(F32{}, sums[p] + i, Whole{});
      put_planes(type, out, i, dim, planes, scale);
    }
  }
};

// Calls work(Of<Sums>) with the place where packed rows of `dim` columns are summed fastest.
template <class Codec, class Work>
JAXREC_INLINE void with_packed_sums(int64_t dim, const Work& work) {
  switch (dim) {
    case 16: return work(Of<PackedRegisters<Codec, 16>>{});
    case 32: return work(Of<PackedRegisters<Codec, 32>>{});
    case 64: return work(Of<PackedRegisters<Codec, 64>>{});
#if JAXREC_VECTOR_BYTES >= 32
    case 128: return work(Of<PackedRegisters<Codec, 128>>{});
#endif
    default: return work(Of<PackedMemory<Codec>>{});
  }
}

// Calls work(codec).
template <class Work>
JAXREC_INLINE void with_codec(Code code, const Work& work) {
  switch (code) {
    case Code::kInt8: return work(Integers<8>{});
    case Code::kInt4: return work(Integers<4>{});
    case Code::kInt2: return work(Integers<2>{});
    case Code::kFloat8: return work(Float8{});
    case Code::kFusedInt8: return work(FusedIntegers{});
    case Code::kE4M3: return work(ScaledFloat8<false>{});
    case Code::kE5M2: return work(ScaledFloat8<true>{});
  }
}

int64_t packed_row_bytes_of(Code code, int64_t dim) {
  int64_t bytes = 0;
  with_codec(code, [&](auto codec) { bytes = packed_row_bytes<decltype(codec)>(dim); });
  return bytes;
}

template <class Codec, class Sums>
void pool_packed_bags(const PackedBlock& block) {
  const PackedTable& table = block.table;
  const uint8_t* rows = table.rows;
  const int64_t dim = Sums::fixed(table.dim), row_bytes = packed_row_bytes<Codec>(dim);
  auto address = [=](uint32_t id) JAXREC_ALWAYS { return rows + id * row_bytes; };
  auto add = [&](Sums& sums, int64_t, int64_t position, uint32_t id) JAXREC_ALWAYS {
    const float weight = block.weights == nullptr ? 1.0f : block.weights[position];
    sums.add(typename Codec::Row(address(id), weight, dim), dim);
  };
  auto ask = [=](uint32_t id) JAXREC_ALWAYS { prefetch_packed<Codec>(address(id), dim); };
  auto put = [&](const Sums& sums, const PooledBag& bag, int64_t, char* out) JAXREC_ALWAYS {
    sums.put(block.out_type, out, factor_of(block, bag), dim);
  };
  const uint32_t num_rows = static_cast<uint32_t>(table.num_rows);
  pool_each_bag<AtOnce<Sums>>(block, num_rows, row_bytes, dim, ask, add, put);
}

void pool_packed(const PackedBlock& block) {
  with_codec(block.table.code, [&](auto codec) JAXREC_ALWAYS {
    with_packed_sums<decltype(codec)>(block.table.dim, [&](auto sums) JAXREC_ALWAYS {
      typedef typename decltype(sums)::Type Sums;
      pool_packed_bags<decltype(codec), Sums>(block);
    });
  });
}

template <class Codec>
void unpack_rows_of(const PackedRowBlock& block, Codec) {
  constexpr int kPlanes = Codec::kPlanes;
  const uint8_t* rows = block.table.rows;
  const int64_t dim = block.table.dim, row_bytes = packed_row_bytes<Codec>(dim);
  const int64_t num_bytes = (dim + kPlanes - 1) / kPlanes;
  const uint32_t num_rows = static_cast<uint32_t>(block.table.num_rows);
  const int64_t ahead = rows_ahead(row_bytes);
  const int64_t out_bytes = dim * size_of(block.out_type);
  const auto place = [=](int64_t i) JAXREC_ALWAYS {
    return static_cast<char*>(block.out) + i * out_bytes;
  };

  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    uint32_t row = static_cast<uint32_t>(block.rows[i]);
    prefetch_packed<Codec>(rows + (row < num_rows ? row : 0) * row_bytes, dim);
    prefetch_to_write(place(i), out_bytes);
  };
  for (int64_t i = 0; i < ahead && i < block.count; ++i) ask(i);
  for (int64_t i = 0; i < block.count; ++i) {
    if (i + ahead < block.count) ask(i + ahead);
    char* out = place(i);
    uint32_t number = static_cast<uint32_t>(block.rows[i]);
    if (__builtin_expect(number < num_rows, 1)) {
      const typename Codec::Row row(rows + number * row_bytes, 1.0f, dim);
      for_each_vector(num_bytes, [&](int64_t byte, auto extent) JAXREC_ALWAYS {
        const Bits bytes = load_bytes(row.bytes + byte, extent);
        Vec planes[kPlanes];
        for (int p = 0; p < kPlanes; ++p) planes[p] = row.value(bytes, p);
        put_planes(block.out_type, out, byte, dim, planes, 1.0f);
      });
    } else {
      Vec fill = splat(number == num_rows ? 0.0f : __builtin_nanf(""));
      for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
        store_as(block.out_type, out, column, fill, extent);
      });
    }
  }
}

void unpack_rows(const PackedRowBlock& block) {
  with_codec(block.table.code, [&](auto codec) JAXREC_ALWAYS { unpack_rows_of(block, codec); });
}
