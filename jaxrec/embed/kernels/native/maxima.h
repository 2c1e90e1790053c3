// The largest element of each column over the rows of a bag. Included once per instruction set, after
// packed.h.
//
// The first of equal elements wins. A NaN wins over all numbers; which of several NaN does is open. A
// bag without rows gives zeros. Where all elements are -infinity, none wins.

constexpr float kSmallest = -__builtin_inff();

// Integers of lanes where the mask is set, of others elsewhere.
JAXREC_INLINE Mask choose(Mask mask, Mask yes, Mask no) { return (mask & yes) | (~mask & no); }
JAXREC_INLINE Mask splat_position(int32_t x) { return x - Mask{}; }

JAXREC_INLINE void store_positions(int32_t* to, Mask x, Whole) {
  store(F32{}, reinterpret_cast<float*>(to), reinterpret_cast<Vec>(x), Whole{});
}
JAXREC_INLINE void store_positions(int32_t* to, Mask x, Part part) {
  store(F32{}, reinterpret_cast<float*>(to), reinterpret_cast<Vec>(x), part);
}

// Whether elements may be NaN. Packed rows hold none. Among elements that may be, NaN counts as
// infinity at first, which takes one comparison in place of two: where the largest element is
// infinite, `keep_nan` looks for NaN once more.
struct MayBeNan {
  static constexpr bool kValue = true;
};
struct NeverNan {
  static constexpr bool kValue = false;
};

// A vector of the largest elements so far, and of their positions where these are wanted.
template <bool kWinners>
struct Largest {
  Vec best;
  Mask winner;

  JAXREC_MEMBER void clear() {
    best = splat(kSmallest);
    winner = splat_position(-1);
  }
  template <class Nan>
  JAXREC_MEMBER void add(Vec x, Mask position, Nan) {
    // `best` is no NaN, so that "not less or equal" is true of larger elements and of NaN. The minimum
    // of NaN and infinity is the second one, infinity.
#if JAXREC_VECTOR_BYTES == 64
    // GCC makes vectors of the masks of the plain form, which takes twice the time.
    if constexpr (Nan::kValue) {
      const __mmask16 wins = _mm512_cmp_ps_mask((__m512)x, (__m512)best, _CMP_NLE_UQ);
      best = (Vec)_mm512_mask_min_ps((__m512)best, wins, (__m512)x, (__m512)splat(-kSmallest));
      if (kWinners) {
        winner = (Mask)_mm512_mask_mov_epi32((__m512i)winner, wins, (__m512i)position);
      }
    } else {
      const __mmask16 wins = _mm512_cmp_ps_mask((__m512)x, (__m512)best, _CMP_GT_OQ);
      best = (Vec)_mm512_mask_mov_ps((__m512)best, wins, (__m512)x);
      if (kWinners) {
        winner = (Mask)_mm512_mask_mov_epi32((__m512i)winner, wins, (__m512i)position);
      }
    }
#elif JAXREC_VECTOR_BYTES == 32
    const __m256 wins = _mm256_cmp_ps((__m256)x, (__m256)best, Nan::kValue ? _CMP_NLE_UQ : _CMP_GT_OQ);
    if (Nan::kValue) x = (Vec)_mm256_min_ps((__m256)x, (__m256)splat(-kSmallest));
    best = (Vec)_mm256_blendv_ps((__m256)best, (__m256)x, wins);
    if (kWinners) winner = (Mask)_mm256_blendv_ps((__m256)winner, (__m256)position, wins);
#else
    const Mask wins = Nan::kValue ? ~(x <= best) : (x > best);
    if (Nan::kValue) x = select(x < -kSmallest, x, splat(-kSmallest));
    best = select(wins, x, best);
    if (kWinners) winner = choose(wins, position, winner);
#endif
  }
  JAXREC_MEMBER void keep_nan(Vec x) { best = select(x != x, x, best); }
  JAXREC_MEMBER bool has_infinity() const {
#if JAXREC_VECTOR_BYTES == 64
    return _mm512_cmp_ps_mask((__m512)best, (__m512)splat(-kSmallest), _CMP_EQ_OQ) != 0;
#elif JAXREC_VECTOR_BYTES == 32
    const __m256 infinite = _mm256_cmp_ps((__m256)best, (__m256)splat(-kSmallest), _CMP_EQ_OQ);
    return _mm256_movemask_ps(infinite) != 0;
#else
    const Mask infinite = best == splat(-kSmallest);
    int32_t any = 0;
    for (int i = 0; i < kWidth; ++i) any |= infinite[i];
    return any != 0;
#endif
  }
};

// The result of a bag: `fill` in place of the largest elements if the bag is empty or has a bad id.
struct BagResult {
  bool has_fill;
  float fill;

  JAXREC_MEMBER explicit BagResult(const PooledBag& bag)
      : has_fill(bag.has_bad_id || bag.is_empty),
        fill(bag.has_bad_id ? __builtin_nanf("") : 0.0f) {}
  JAXREC_MEMBER Vec operator()(Vec best) const { return has_fill ? splat(fill) : best; }
  JAXREC_MEMBER Mask operator()(Mask winner) const { return has_fill ? splat_position(-1) : winner; }
};

// Largest elements in registers, of `kVectors` whole vectors. GCC leaves long loops as they are, and
// the vectors in memory.
template <int kVectors, bool kWinners>
struct MaxRegisters {
  Largest<kWinners> columns[kVectors];

  JAXREC_MEMBER static int64_t fixed(int64_t) { return kVectors * kWidth; }
  JAXREC_MEMBER void clear(int64_t) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) columns[i].clear();
  }
  template <class T>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, int32_t position) {
    Mask positions = splat_position(position);
#if JAXREC_VECTOR_BYTES == 64
    asm("" : "+v"(positions));  // GCC would copy the position to each vector from a plain register.
#endif
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      columns[i].add(load(type, row + i * kWidth, Whole{}), positions, MayBeNan{});
    }
  }
  template <class T>
  JAXREC_MEMBER void keep_nan(T type, const typename T::Storage* row) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) columns[i].keep_nan(load(type, row + i * kWidth, Whole{}));
  }
  JAXREC_MEMBER bool has_infinity() const {
    bool any = false;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) any |= columns[i].has_infinity();
    return any;
  }
  JAXREC_MEMBER void put(Type type, void* out, int32_t* winners, const BagResult& result) const {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      store_as(type, out, i * kWidth, result(columns[i].best), Whole{});
      if (kWinners) store_positions(winners + i * kWidth, result(columns[i].winner), Whole{});
    }
  }
};

// Largest elements in a register, of fewer columns than a vector has.
template <bool kWinners>
struct MaxRegisterPart {
  Largest<kWinners> column;
  Part part;

  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  JAXREC_MEMBER void clear(int64_t dim) {
    column.clear();
    part.count = static_cast<int>(dim);
  }
  template <class T>
  JAXREC_MEMBER void add(T type, const typename T::Storage* row, int32_t position) {
    column.add(load(type, row, part), splat_position(position), MayBeNan{});
  }
  template <class T>
  JAXREC_MEMBER void keep_nan(T type, const typename T::Storage* row) {
    column.keep_nan(load(type, row, part));
  }
  JAXREC_MEMBER bool has_infinity() const { return column.has_infinity(); }
  JAXREC_MEMBER void put(Type type, void* out, int32_t* winners, const BagResult& result) const {
    store_as(type, out, 0, result(column.best), part);
    if (kWinners) store_positions(winners, result(column.winner), part);
  }
};

// Rows of any length, in panels of columns as InPanels has them.
template <bool kWinners>
struct MaxInPanels {
  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  template <class Work>
  JAXREC_MEMBER static void each_panel(int64_t dim, const Work& work) {
    int64_t column = 0;
    while (max_of_vectors<4>(dim, column, work)) {
    }
    max_of_vectors<2>(dim, column, work);
    max_of_vectors<1>(dim, column, work);
    if (column < dim) {
      MaxRegisterPart<kWinners> columns;
      work(column, columns);
    }
  }

 private:
  template <int kVectors, class Work>
  JAXREC_MEMBER static bool max_of_vectors(int64_t dim, int64_t& column, const Work& work) {
    if (column + kVectors * kWidth > dim) return false;
    MaxRegisters<kVectors, kWinners> columns;
    work(column, columns);
    column += kVectors * kWidth;
    return true;
  }
};

// Calls work(Of<...>), the way in which rows of `dim` elements are compared. Positions take as many
// registers as elements, so fewer columns are compared at once than are summed.
template <bool kWinners, class Work>
JAXREC_INLINE void with_max_panels(int64_t dim, const Work& work) {
  switch (dim) {
    case 16: return work(Of<AtOnce<MaxRegisters<16 / kWidth, kWinners>>>{});
#if JAXREC_VECTOR_BYTES >= 32
    case 32: return work(Of<AtOnce<MaxRegisters<32 / kWidth, kWinners>>>{});
#endif
#if JAXREC_VECTOR_BYTES >= 64
    case 64: return work(Of<AtOnce<MaxRegisters<64 / kWidth, kWinners>>>{});
    case 128: return work(Of<AtOnce<MaxRegisters<128 / kWidth, kWinners>>>{});
#endif
  }
  if (dim < kWidth) return work(Of<AtOnce<MaxRegisterPart<kWinners>>>{});
  return work(Of<MaxInPanels<kWinners>>{});
}

// The winners of a bag from `column` on. Those of a later bag are asked for.
template <class Block>
JAXREC_INLINE int32_t* winners_of(const Block& block, const PooledBag& bag, int64_t column) {
  const int64_t later = bag.number + kBagsAhead;
  if (column == 0 && later < block.num_bags) {
    prefetch_to_write(block.winners + later * block.out_stride, block.table.dim * 4);
  }
  return block.winners + bag.number * block.out_stride + column;
}

template <class Panels, bool kWinners, class RowAt, class T>
void find_max_of(const MaxBlock& block, T type) {
  const int64_t dim = Panels::fixed(block.table.dim);
  const RowAt row_at(block.table, dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename T::Storage));
  auto add = [&](auto& columns, int64_t column, int64_t position, uint32_t id) JAXREC_ALWAYS {
    columns.add(type, row_at(id) + column, block.first_position + static_cast<int32_t>(position));
  };
  const bool into_first_level = prefetching().into_first_level;
  auto ask = [&](uint32_t id) JAXREC_ALWAYS { prefetch(row_at(id), row_bytes, into_first_level); };
  const uint32_t num_rows = static_cast<uint32_t>(block.table.num_rows);
  auto put = [&](auto& columns, const PooledBag& bag, int64_t column, char* out) JAXREC_ALWAYS {
    int32_t* winners = kWinners ? winners_of(block, bag, column) : nullptr;
    if (__builtin_expect(columns.has_infinity(), 0)) {
      for (int64_t position = bag.begin; position < bag.end; ++position) {
        const uint32_t id = static_cast<uint32_t>(block.ids[position]);
        if (id < num_rows) columns.keep_nan(type, row_at(id) + column);
      }
    }
    columns.put(block.out_type, out, winners, BagResult(bag));
  };
  pool_each_bag<Panels>(block, num_rows, row_bytes, dim, ask, add, put);
}

template <bool kWinners>
JAXREC_INLINE void find_max_with(const MaxBlock& block) {
  with_type(block.table.type, [&](auto type) JAXREC_ALWAYS {
    typedef typename decltype(type)::Storage Storage;
    if (block.table.rows->num_parts > 1) {
      return find_max_of<MaxInPanels<kWinners>, kWinners, InParts<Storage>>(block, type);
    }
    with_max_panels<kWinners>(block.table.dim, [&](auto panels) JAXREC_ALWAYS {
      typedef typename decltype(panels)::Type Panels;
      find_max_of<Panels, kWinners, InOnePart<Storage>>(block, type);
    });
  });
}

void find_max(const MaxBlock& block) {
  if (block.winners == nullptr) {
    find_max_with<false>(block);
  } else {
    find_max_with<true>(block);
  }
}

// Calls store(plane, first column, Whole or Part) for the columns of a vector of bytes, the first of
// which is number `byte` of the row.
template <int kPlanes, class Store>
JAXREC_INLINE void for_each_plane(int64_t byte, int64_t dim, const Store& store) {
  for (int p = 0; p < kPlanes; ++p) {
    const int64_t column = byte * kPlanes + p * kWidth;
    if (column + kWidth <= dim) {
      store(p, column, Whole{});
    } else if (column < dim) {
      store(p, column, Part{static_cast<int>(dim - column)});
    }
  }
}

// Stores the largest elements of the columns of one vector of bytes, and their positions.
template <int kPlanes, bool kWinners>
JAXREC_INLINE void put_largest(Type type, void* out, int32_t* winners, int64_t byte, int64_t dim,
                               const Largest<kWinners> (&planes)[kPlanes], const BagResult& result) {
  Vec columns[kPlanes];
  for (int p = 0; p < kPlanes; ++p) columns[p] = result(planes[p].best);
  interleave_planes(columns);
  for_each_plane<kPlanes>(byte, dim, [&](int p, int64_t column, auto extent) JAXREC_ALWAYS {
    store_as(type, out, column, columns[p], extent);
  });
  if (!kWinners) return;
  // The bits of positions, moved as those of floats.
  for (int p = 0; p < kPlanes; ++p) columns[p] = reinterpret_cast<Vec>(result(planes[p].winner));
  interleave_planes(columns);
  for_each_plane<kPlanes>(byte, dim, [&](int p, int64_t column, auto extent) JAXREC_ALWAYS {
    store_positions(winners + column, reinterpret_cast<Mask>(columns[p]), extent);
  });
}

// Largest elements of packed rows in registers, for rows of `kDim` columns.
template <class Codec, bool kWinners, int kDim>
struct PackedMaxRegisters {
  static constexpr int kPlanes = Codec::kPlanes;
  static constexpr int kBytes = kDim / kPlanes;
  static constexpr int kVectors = (kBytes + kWidth - 1) / kWidth;
  Largest<kWinners> columns[kVectors][kPlanes];

  JAXREC_MEMBER static int64_t fixed(int64_t) { return kDim; }
  JAXREC_MEMBER void clear(int64_t) {
    for (int v = 0; v < kVectors; ++v) {
      for (int p = 0; p < kPlanes; ++p) columns[v][p].clear();
    }
  }
  JAXREC_MEMBER void add(const typename Codec::Row& row, int32_t position, int64_t) {
    const Mask positions = splat_position(position);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Bits bytes = v * kWidth + kWidth <= kBytes
                             ? load_bytes(row.bytes + v * kWidth, Whole{})
                             : load_bytes(row.bytes + v * kWidth, Part{kBytes - v * kWidth});
#pragma GCC unroll 4
      for (int p = 0; p < kPlanes; ++p) columns[v][p].add(row.value(bytes, p), positions, NeverNan{});
    }
  }
  JAXREC_MEMBER void put(Type type, void* out, int32_t* winners, const BagResult& result,
                         int64_t) const {
    for (int v = 0; v < kVectors; ++v) {
      put_largest<kPlanes>(type, out, winners, v * kWidth, kDim, columns[v], result);
    }
  }
};

// Largest elements of packed rows in the first-level cache, by planes.
template <class Codec, bool kWinners>
struct PackedMaxima {
  static constexpr int kPlanes = Codec::kPlanes;
  alignas(64) float best[kPlanes][kMaxDim / kPlanes];
  alignas(64) int32_t winner[kPlanes][kWinners ? kMaxDim / kPlanes : 1];

  JAXREC_MEMBER static int64_t fixed(int64_t dim) { return dim; }
  JAXREC_MEMBER static int64_t num_bytes(int64_t dim) { return (dim + kPlanes - 1) / kPlanes; }
  JAXREC_MEMBER void clear(int64_t dim) {
    for (int64_t i = 0; i < num_bytes(dim); i += kWidth) {
      for (int p = 0; p < kPlanes; ++p) {
        store(F32{}, best[p] + i, splat(kSmallest), Whole{});
        if (kWinners) store_positions(winner[p] + i, splat_position(-1), Whole{});
      }
    }
  }
  JAXREC_MEMBER void add(const typename Codec::Row& row, int32_t position, int64_t dim) {
    const Mask positions = splat_position(position);
    for_each_vector(num_bytes(dim), [&](int64_t i, auto extent) JAXREC_ALWAYS {
      const Bits bytes = load_bytes(row.bytes + i, extent);
      for (int p = 0; p < kPlanes; ++p) {
        Largest<kWinners> column = at(p, i);
        column.add(row.value(bytes, p), positions, NeverNan{});
        store(F32{}, best[p] + i, column.best, Whole{});
        if (kWinners) store_positions(winner[p] + i, column.winner, Whole{});
      }
    });
  }
  JAXREC_MEMBER void put(Type type, void* out, int32_t* winners, const BagResult& result,
                         int64_t dim) const {
    for (int64_t i = 0; i < num_bytes(dim); i += kWidth) {
      Largest<kWinners> planes[kPlanes];
      for (int p = 0; p < kPlanes; ++p) planes[p] = at(p, i);
      put_largest<kPlanes>(type, out, winners, i, dim, planes, result);
    }
  }

 private:
  JAXREC_MEMBER Largest<kWinners> at(int plane, int64_t i) const {
    Largest<kWinners> columns;
    columns.best = load(F32{}, best[plane] + i, Whole{});
    if (kWinners) {
      columns.winner = reinterpret_cast<Mask>(
          load(F32{}, reinterpret_cast<const float*>(winner[plane] + i), Whole{}));
    }
    return columns;
  }
};

// Calls work(Of<Maxima>) with the place where packed rows of `dim` columns are compared fastest.
template <class Codec, bool kWinners, class Work>
JAXREC_INLINE void with_packed_maxima(int64_t dim, const Work& work) {
  switch (dim) {
    case 16: return work(Of<PackedMaxRegisters<Codec, kWinners, 16>>{});
#if JAXREC_VECTOR_BYTES >= 32
    case 32: return work(Of<PackedMaxRegisters<Codec, kWinners, 32>>{});
#endif
#if JAXREC_VECTOR_BYTES >= 64
    case 64: return work(Of<PackedMaxRegisters<Codec, kWinners, 64>>{});
    case 128: return work(Of<PackedMaxRegisters<Codec, kWinners, 128>>{});
#endif
    default: return work(Of<PackedMaxima<Codec, kWinners>>{});
  }
}

template <class Codec, bool kWinners, class Maxima>
void find_max_packed_of(const PackedMaxBlock& block) {
  const PackedTable& table = block.table;
  const uint8_t* rows = table.rows;
  const int64_t dim = Maxima::fixed(table.dim), row_bytes = packed_row_bytes<Codec>(dim);
  auto address = [=](uint32_t id) JAXREC_ALWAYS { return rows + id * row_bytes; };
  auto add = [&](Maxima& maxima, int64_t, int64_t position, uint32_t id) JAXREC_ALWAYS {
    const int32_t place = block.first_position + static_cast<int32_t>(position);
    maxima.add(typename Codec::Row(address(id), 1.0f, dim), place, dim);
  };
  auto ask = [=](uint32_t id) JAXREC_ALWAYS { prefetch_packed<Codec>(address(id), dim); };
  auto put = [&](const Maxima& maxima, const PooledBag& bag, int64_t, char* out) JAXREC_ALWAYS {
    int32_t* winners = kWinners ? winners_of(block, bag, 0) : nullptr;
    maxima.put(block.out_type, out, winners, BagResult(bag), dim);
  };
  const uint32_t num_rows = static_cast<uint32_t>(table.num_rows);
  pool_each_bag<AtOnce<Maxima>>(block, num_rows, row_bytes, dim, ask, add, put);
}

template <bool kWinners>
JAXREC_INLINE void find_max_packed_with(const PackedMaxBlock& block) {
  with_codec(block.table.code, [&](auto codec) JAXREC_ALWAYS {
    typedef decltype(codec) Codec;
    with_packed_maxima<Codec, kWinners>(block.table.dim, [&](auto maxima) JAXREC_ALWAYS {
      find_max_packed_of<Codec, kWinners, typename decltype(maxima)::Type>(block);
    });
  });
}

void find_max_packed(const PackedMaxBlock& block) {
  if (block.winners == nullptr) {
    find_max_packed_with<false>(block);
  } else {
    find_max_packed_with<true>(block);
  }
}
