// Lookups: bags of rows and single rows. Included once per instruction set, after sums.h.

// Rows are asked for this many bytes (in whole rows) before they are needed: enough to hide the
// latency of memory.
constexpr int64_t kBytesAhead = 65536;
constexpr int64_t kMostRowsAhead = 64;

// Rows of the output are asked for, too, so many bags before they are written: between two bags of a
// feature lie those of the others, so that no core foresees where the next one goes. With one id a
// bag, half of the time was spent waiting for them.
constexpr int64_t kBagsAhead = 12;

JAXREC_INLINE int64_t rows_ahead(int64_t row_bytes) {
  int64_t rows = kBytesAhead / row_bytes;
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

// Pools consecutive bags. ask(id) prefetches a row, and add(position, id) adds it to `sums`.
template <class Sums, class Ask, class Add>
JAXREC_INLINE void pool_each_bag(const Bags& bags, uint32_t num_rows, int64_t row_bytes, int64_t dim,
                                 Sums& sums, const Ask& ask_row, const Add& add) {
  const int64_t ahead = rows_ahead(row_bytes);
  const int64_t out_bytes = bags.out_stride * size_of(bags.out_type);
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
    if (bag < bags.num_bags) prefetch(first_out + bag * out_bytes, dim * size_of(bags.out_type));
  };
  for (int64_t bag = 0; bag < kBagsAhead; ++bag) ask_out(bag);

  int64_t position = 0;
  for (int64_t bag = 0; bag < bags.num_bags; ++bag, out += out_bytes) {
    int64_t length = bags.lengths[bag] < 0 ? 0 : bags.lengths[bag];
    int64_t end = position + length;
    if (end > num_ids) end = num_ids;
    bool outside = false;
    ask_out(bag + kBagsAhead);
    sums.clear(dim);
    for (; position < end; ++position) {
      if (position + ahead < num_ids) ask(position + ahead);
      uint32_t id = static_cast<uint32_t>(ids[position]);
      if (__builtin_expect(id >= num_rows, 0)) {
        outside = true;
        continue;
      }
      add(position, id);
    }
    float scale = bags.mean && length > 1 ? 1.0f / static_cast<float>(length) : 1.0f;
    sums.put(bags.out_type, out, outside ? __builtin_nanf("") : scale, dim);
  }
}

// Whether bags have weights, as far as it is known when this is compiled.
enum class Weights { kNone, kSome, kAny };

template <class Sums, Weights kWeights, class RowAt, class T>
void pool_bags(const PooledBlock& block, T type) {
  // Here, so that all of it stays in registers, and a known number of columns is a constant.
  Sums sums;
  const int64_t dim = Sums::fixed(block.table.dim);
  const RowAt row_at(block.table, dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename T::Storage));
  auto add = [&](int64_t position, uint32_t id) JAXREC_ALWAYS {
    if (kWeights == Weights::kNone) {
      sums.add(type, row_at(id), AsIs{}, dim);
    } else {
      const bool is_one = kWeights == Weights::kAny && block.weights == nullptr;
      sums.add(type, row_at(id), Scaled{is_one ? 1.0f : block.weights[position]}, dim);
    }
  };
  auto ask = [&](uint32_t id) JAXREC_ALWAYS { prefetch(row_at(id), row_bytes); };
  pool_each_bag(block, static_cast<uint32_t>(block.table.num_rows), row_bytes, dim, sums, ask, add);
}

void pool(const PooledBlock& block) {
  with_type(block.table.type, [&](auto type) JAXREC_ALWAYS {
    with_sums(block.table.dim, [&](auto sums) JAXREC_ALWAYS {
      typedef typename decltype(type)::Storage Storage;
      typedef typename decltype(sums)::Type Sums;
      if (block.table.rows->num_parts > 1) {
        pool_bags<Sums, Weights::kAny, InParts<Storage>>(block, type);
      } else if (block.weights != nullptr) {
        pool_bags<Sums, Weights::kSome, InOnePart<Storage>>(block, type);
      } else {
        pool_bags<Sums, Weights::kNone, InOnePart<Storage>>(block, type);
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

  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    uint32_t row = static_cast<uint32_t>(block.rows[i]);
    prefetch(row_at(row < num_rows ? row : 0), row_bytes);
    prefetch(out + i * dim, row_bytes);
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
