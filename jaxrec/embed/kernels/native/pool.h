// Lookups: bags of rows and single rows. Included once per instruction set, after sums.h.

// The most rows that are prefetched before their turn; see Prefetching.
constexpr int64_t kMostRowsAhead = 64;

// Rows of the output are prefetched too, this many bags ahead. Between two bags of a feature lie the
// bags of the other features, a stride that the processor's own prefetcher does not follow. With one
// id a bag, half of the time was spent waiting for them.
constexpr int64_t kBagsAhead = 12;

JAXREC_INLINE int64_t rows_ahead(int64_t row_bytes) {
  const int64_t rows = prefetching().bytes_ahead / row_bytes;
  return rows < 2 ? 2 : rows > kMostRowsAhead ? kMostRowsAhead : rows;
}

// Rows one after the other,
template <class Storage>
struct InOnePart {
  const Storage* rows;
  int64_t dim;

  JAXREC_MEMBER explicit InOnePart(const Source& source, int64_t dim)
      : rows(static_cast<const Storage*>(source.rows->parts[0]) + source.first_row * dim),
        dim(dim) {}
  JAXREC_MEMBER const Storage* operator()(uint32_t row) const { return rows + row * dim; }
};

// and in equal parts apart.
template <class Storage>
struct InParts {
  void* const* parts;
  uint32_t first_row, part_rows;
  int64_t dim;

  JAXREC_MEMBER explicit InParts(const Source& source, int64_t dim)
      : parts(source.rows->parts),
        first_row(static_cast<uint32_t>(source.first_row)),
        part_rows(static_cast<uint32_t>(source.rows->part_rows)),
        dim(dim) {}
  JAXREC_MEMBER const Storage* operator()(uint32_t row) const {
    const uint32_t at = row + first_row, part = at / part_rows;
    return static_cast<const Storage*>(parts[part]) + (at - part * part_rows) * dim;
  }
};

// Calls work(row), where row(i) is where row i of the source begins.
template <class Storage, class Work>
JAXREC_INLINE void with_rows(const Source& source, int64_t dim, const Work& work) {
  if (source.rows->num_parts == 1) {
    work(InOnePart<Storage>(source, dim));
  } else {
    work(InParts<Storage>(source, dim));
  }
}

// A bag whose rows were pooled.
struct PooledBag {
  int64_t number, length;
  int64_t begin, end;  // Of its ids.
  bool has_bad_id;  // Whether an id is outside of the table.
  bool is_empty;    // Also where its length is not 0, but all ids of the feature are used up.
};

// Pools consecutive bags. ask(id) prefetches a row, add(sums, column, position, id) adds its columns
// from `column` on to `sums`, and put(sums, bag, column, out) stores them as columns of the output.
template <class Panels, class Ask, class Add, class Put>
JAXREC_INLINE void pool_each_bag(const Bags& bags, uint32_t num_rows, int64_t row_bytes, int64_t dim,
                                 const Ask& ask_row, const Add& add, const Put& put) {
  const int64_t ahead = rows_ahead(row_bytes);
  const int64_t element_bytes = size_of(bags.out_type), out_bytes = bags.out_stride * element_bytes;
  char* out = static_cast<char*>(bags.out);
  const int32_t* ids = bags.ids;
  const int64_t num_ids = bags.num_ids;

  auto ask = [=](int64_t position) JAXREC_ALWAYS {
    uint32_t id = static_cast<uint32_t>(ids[position]);
    id = id < num_rows ? id : 0;
    asm("" : "+r"(id));  // A move on a condition: GCC would make it a branch.
    ask_row(id);
  };
  for (int64_t i = 0; i < ahead && i < num_ids; ++i) ask(i);
  const char* first_out = out;
  auto ask_out = [&](int64_t bag) JAXREC_ALWAYS {
    if (bag < bags.num_bags) prefetch_to_write(first_out + bag * out_bytes, dim * element_bytes);
  };
  for (int64_t bag = 0; bag < kBagsAhead; ++bag) ask_out(bag);

  int64_t begin = 0;
  for (int64_t bag = 0; bag < bags.num_bags; ++bag, out += out_bytes) {
    const int64_t length = bags.lengths[bag] < 0 ? 0 : bags.lengths[bag];
    const int64_t end = begin + length < num_ids ? begin + length : num_ids;
    ask_out(bag + kBagsAhead);
    Panels::each_panel(dim, [&](int64_t column, auto& sums) JAXREC_ALWAYS {
      bool outside = false;
      sums.clear(dim - column);
      for (int64_t position = begin; position < end; ++position) {
        if (column == 0 && position + ahead < num_ids) ask(position + ahead);
        uint32_t id = static_cast<uint32_t>(ids[position]);
        if (__builtin_expect(id >= num_rows, 0)) {
          outside = true;
          continue;
        }
        add(sums, column, position, id);
      }
      put(sums, PooledBag{bag, length, begin, end, outside, begin == end}, column,
          out + column * element_bytes);
    });
    begin = end;
  }
}

// The factor of a bag's sum: 1 over its length in a mean, and NaN if an id is outside of the table.
JAXREC_INLINE float factor_of(const Bags& bags, const PooledBag& bag) {
  if (bag.has_bad_id) return __builtin_nanf("");
  return bags.mean && bag.length > 1 ? 1.0f / static_cast<float>(bag.length) : 1.0f;
}

// Whether bags have weights, as far as it is known when this is compiled.
enum class Weights { kNone, kSome, kAny };

template <class Panels, Weights kWeights, class RowAt, class T>
void pool_bags(const PooledBlock& block, T type) {
  const int64_t dim = Panels::fixed(block.table.dim);  // A known number of columns is a constant.
  const RowAt row_at(block.table, dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename T::Storage));
  auto add = [&](auto& sums, int64_t column, int64_t position, uint32_t id) JAXREC_ALWAYS {
    const auto* row = row_at(id) + column;
    if (kWeights == Weights::kNone) {
      sums.add(type, row, AsIs{}, dim - column);
    } else {
      const bool is_one = kWeights == Weights::kAny && block.weights == nullptr;
      sums.add(type, row, Scaled{is_one ? 1.0f : block.weights[position]}, dim - column);
    }
  };
  const bool into_first_level = prefetching().into_first_level;
  auto ask = [&](uint32_t id) JAXREC_ALWAYS { prefetch(row_at(id), row_bytes, into_first_level); };
  auto put = [&](const auto& sums, const PooledBag& bag, int64_t column, char* out) JAXREC_ALWAYS {
    sums.put(block.out_type, out, factor_of(block, bag), dim - column);
  };
  const uint32_t num_rows = static_cast<uint32_t>(block.table.num_rows);
  pool_each_bag<Panels>(block, num_rows, row_bytes, dim, ask, add, put);
}

void pool(const PooledBlock& block) {
  with_type(block.table.type, [&](auto type) JAXREC_ALWAYS {
    with_panels(block.table.dim, [&](auto panels) JAXREC_ALWAYS {
      typedef typename decltype(type)::Storage Storage;
      typedef typename decltype(panels)::Type Panels;
      if (block.table.rows->num_parts > 1) {
        pool_bags<Panels, Weights::kAny, InParts<Storage>>(block, type);
      } else if (block.weights != nullptr) {
        pool_bags<Panels, Weights::kSome, InOnePart<Storage>>(block, type);
      } else {
        pool_bags<Panels, Weights::kNone, InOnePart<Storage>>(block, type);
      }
    });
  });
}

template <class T, class RowAt>
void copy_rows_of(const RowBlock& block, T type, const RowAt& row_at) {
  typedef typename T::Storage Storage;
  Storage* out = static_cast<Storage*>(block.out);
  const uint32_t num_rows = static_cast<uint32_t>(block.table.num_rows);
  const int64_t dim = block.table.dim;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Storage));
  const int64_t ahead = rows_ahead(row_bytes);

  const bool into_first_level = prefetching().into_first_level;
  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    uint32_t row = static_cast<uint32_t>(block.rows[i]);
    prefetch(row_at(row < num_rows ? row : 0), row_bytes, into_first_level);
    prefetch_to_write(out + i * dim, row_bytes);
  };
  for (int64_t i = 0; i < ahead && i < block.count; ++i) ask(i);
  for (int64_t i = 0; i < block.count; ++i) {
    if (i + ahead < block.count) ask(i + ahead);
    uint32_t row = static_cast<uint32_t>(block.rows[i]);
    Storage* to = out + i * dim;
    if (__builtin_expect(row < num_rows, 1)) {
      copy(type, to, row_at(row), dim);
    } else {
      Vec fill = splat(row == num_rows ? 0.0f : __builtin_nanf(""));
      for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
        store(type, to + column, fill, extent);
      });
    }
  }
}

void copy_rows(const RowBlock& block) {
  with_type(block.table.type, [&](auto type) JAXREC_ALWAYS {
    typedef typename decltype(type)::Storage Storage;
    with_rows<Storage>(block.table, block.table.dim, [&](const auto& row_at) JAXREC_ALWAYS {
      copy_rows_of(block, type, row_at);
    });
  });
}
