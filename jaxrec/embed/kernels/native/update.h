// Sums of gradients, and the update of the rows in a stretch of the sorted lookups. Included once
// per instruction set, after sums.h and optimizers.h.

// How many runs before their turn the rows of the table are asked for,
constexpr int64_t kUpdatesAhead = 24;

// and how many lookups before theirs the gradients: enough bytes to hide the latency of the cache
// or memory that they come from.
constexpr int64_t kGradientBytesAhead = 4096;
JAXREC_INLINE int64_t gradients_ahead(int64_t row_bytes) {
  const int64_t rows = kGradientBytesAhead / row_bytes;
  return rows < 8 ? 8 : rows > 32 ? 32 : rows;
}

JAXREC_INLINE int64_t bag_of(const Gradients& gradients, uint32_t value) {
  return gradients.bags == nullptr ? value : gradients.bags[value];
}

// Puts the sum of the gradients of entries [begin, end), in whole vectors, at `out`; calls ask(i)
// before each is read.
template <class G, class Panels, class Ask>
JAXREC_INLINE void sum_gradients(const Gradients& gradients, const Entry* entries, int64_t begin,
                                 int64_t end, G type, float* out, const Ask& ask) {
  const int64_t dim = Panels::fixed(gradients.dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename G::Storage));
  const bool plain = gradients.scales == nullptr && !(gradients.bound < __builtin_inff());
  Panels::each_panel(dim, [&](int64_t column, auto& sums) JAXREC_ALWAYS {
    sums.clear(dim - column);
    for (int64_t i = begin; i < end; ++i) {
      if (column == 0) ask(i);
      const uint32_t value = entries[i].value;
      const char* place = gradients.rows->at(bag_of(gradients, value), row_bytes);
      const auto* row = reinterpret_cast<const typename G::Storage*>(place) + column;
      if (plain) {
        sums.add(type, row, AsIs{}, dim - column);
      } else {
        float scale = gradients.scales == nullptr ? 1.0f : gradients.scales[value];
        sums.add(type, row, ClippedAndScaled{gradients.bound, scale}, dim - column);
      }
    }
    sums.keep(out + column, dim - column);
  });
}

// Asks for the gradient of an entry.
template <class G>
JAXREC_INLINE void ask_gradient(const Gradients& gradients, const Entry& entry, int64_t dim) {
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename G::Storage));
  prefetch(gradients.rows->at(bag_of(gradients, entry.value), row_bytes), row_bytes);
}

// Asks for a row and its state, to write them.
JAXREC_INLINE void ask_row(const Table& table, const Step& step, uint32_t row, int64_t dim) {
  char* rows = static_cast<char*>(table.rows);
  if (table.type == Type::kF32) {
    prefetch_to_write(rows + row * dim * 4, dim * 4);
  } else {
    prefetch_to_write(rows + row * dim * 2, dim * 2);
  }
  switch (step.rule) {
    case Rule::kSgd: break;
    case Rule::kRowwiseAdagrad:
      prefetch_to_write(step.first + row, 4);
      break;
    case Rule::kAdagrad:
      prefetch_to_write(step.first + row * dim, dim * 4);
      break;
    case Rule::kAdam:
      prefetch_to_write(step.first + row * dim, dim * 4);
      prefetch_to_write(step.second + row * dim, dim * 4);
      break;
    case Rule::kPartialRowwiseAdam:
      prefetch_to_write(step.first + row * dim, dim * 4);
      prefetch_to_write(step.second + row, 4);
      break;
  }
  if (step.counts_rows) prefetch_to_write(step.counts + row, 4);
}

// The end of the run of equal rows that begins at `begin`: far ends are searched for, not walked to.
JAXREC_INLINE int64_t run_end(const Entry* entries, int64_t begin, int64_t count) {
  const uint32_t row = entries[begin].row;
  // All before `low` are of the row.
  int64_t low = begin + 1, reach = 1;
  while (low + reach <= count && entries[low + reach - 1].row == row) {
    low += reach;
    reach *= 2;
  }
  for (; reach > 0; reach /= 2) {
    if (low + reach <= count && entries[low + reach - 1].row == row) low += reach;
  }
  return low;
}

// A walk over the runs of equal rows that begin within a stretch of the sorted lookups.
struct Walk {
  const Entry* entries;   // All lookups,
  int64_t count;          // and how many there are.
  int64_t at;             // The next run
  int64_t num_runs;       // of this many.
  LongRun* long_runs;     // Where runs of more than kPiece go that are left for later,
  int64_t num_long_runs;  // and how many there were.
  uint32_t starts[kMostInStretch + 1];  // Where each run begins; the end of the last.

  JAXREC_MEMBER uint32_t row(int64_t run) const { return entries[starts[run]].row; }
};

// A run that began before the stretch belongs to the one before.
JAXREC_INLINE void begin_walk(Walk& walk, const Entry* entries, int64_t count, int64_t begin,
                              int64_t end, LongRun* long_runs) {
  walk.entries = entries;
  walk.count = count;
  walk.at = 0;
  walk.long_runs = long_runs;
  walk.num_long_runs = 0;
  // Without branches, which runs of one and of more lookups by turns would mislead.
  int64_t runs = 0;
  uint32_t before = begin > 0 ? entries[begin - 1].row : ~entries[begin].row;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t row = entries[i].row;
    walk.starts[runs] = static_cast<uint32_t>(i);
    runs += row != before;
    before = row;
  }
  walk.num_runs = runs;
  if (runs > 0) {
    walk.starts[runs] = static_cast<uint32_t>(run_end(entries, walk.starts[runs - 1], count));
  }
}

// Sums the gradients of each of the next runs, as many as `together` has room for. If there is a
// table, prefetches the rows to update. The rest of an update is compiled once, not for each type
// and length of a row.
template <class G, class Panels>
void sum_next_runs(const Gradients& gradients, const Table* table, const Step* step, Walk& walk,
                   Together& together) {
  const Entry* entries = walk.entries;
  const int64_t count = walk.count, dim = Panels::fixed(gradients.dim);
  const int most_together = rows_together(dim);
  // Rows are read when all that are applied together have their gradients.
  const int64_t rows_ahead = kUpdatesAhead + most_together;

  const int64_t ahead = gradients_ahead(dim * static_cast<int64_t>(sizeof(typename G::Storage)));
  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    if (i + ahead < count) ask_gradient<G>(gradients, entries[i + ahead], dim);
  };

  together.count = 0;
  for (; walk.at < walk.num_runs && together.count < most_together; ++walk.at) {
    if (table != nullptr && walk.at + rows_ahead < walk.num_runs) {
      ask_row(*table, *step, walk.row(walk.at + rows_ahead), dim);
    }
    const int64_t begin = walk.starts[walk.at], end = walk.starts[walk.at + 1];
    if (end - begin > kPiece) {
      walk.long_runs[walk.num_long_runs++] = {begin, end};
    } else {
      float* sum = together.gradient(together.count, dim);
      sum_gradients<G, Panels>(gradients, entries, begin, end, G{}, sum, ask);
      together.rows[together.count++] = entries[begin].row;
    }
  }
}

typedef void (*SumNextRuns)(const Gradients&, const Table*, const Step*, Walk&, Together&);

SumNextRuns choose_sums(const Gradients& gradients) {
  SumNextRuns chosen = nullptr;
  with_type(gradients.type, [&](auto type) {
    with_panels(gradients.dim, [&](auto panels) {
      chosen = sum_next_runs<decltype(type), typename decltype(panels)::Type>;
    });
  });
  return chosen;
}

// Asks for the gradients that a walk begins with.
JAXREC_INLINE void ask_first_gradients(const Gradients& gradients, const Walk& walk) {
  if (walk.num_runs == 0) return;
  const int64_t row_bytes = gradients.dim * size_of(gradients.type), begin = walk.starts[0];
  const int64_t ahead = gradients_ahead(row_bytes);
  for (int64_t i = begin; i < begin + ahead && i < walk.count; ++i) {
    prefetch(gradients.rows->at(bag_of(gradients, walk.entries[i].value), row_bytes), row_bytes);
  }
}

void update(UpdateBlock& block) {
  const Gradients gradients = block.gradients;
  const Table table = block.table;
  const Step step = block.step;
  const SumNextRuns sum_next = choose_sums(gradients);
  const ApplyRows apply_rows = choose_rule(table.type, step.rule);
  Walk walk;
  begin_walk(walk, block.entries, block.count, block.begin, block.end, block.long_runs);

  const int64_t rows_ahead = kUpdatesAhead + rows_together(table.dim);
  for (int64_t run = 0; run < rows_ahead && run < walk.num_runs; ++run) {
    ask_row(table, step, walk.row(run), table.dim);
  }
  ask_first_gradients(gradients, walk);
  Together together;
  while (walk.at < walk.num_runs) {
    sum_next(gradients, &table, &step, walk, together);
    if (together.count > 0) apply_rows(table, step, together);
  }
  block.num_long_runs = walk.num_long_runs;
}

// Rows [begin, end) of sums become 0.
JAXREC_INLINE void clear_rows(const Rows& sums, int64_t begin, int64_t end, int64_t dim) {
  for (int64_t row = begin; row < end; ++row) {
    float* out = reinterpret_cast<float*>(sums.at(row, dim * 4));
    for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      store(F32{}, out + column, Vec{}, extent);
    });
  }
}

void sum_runs(SumBlock& block) {
  const Gradients gradients = block.gradients;
  const Rows& out = *block.sums;
  const Entry* entries = block.entries;
  const int64_t dim = gradients.dim;
  const SumNextRuns sum_next = choose_sums(gradients);
  Walk walk;
  begin_walk(walk, entries, block.count, block.begin, block.end, block.long_runs);

  ask_first_gradients(gradients, walk);
  int64_t next = block.begin > 0 ? entries[block.begin - 1].row + int64_t{1} : 0;
  Together together;
  while (walk.at < walk.num_runs) {
    sum_next(gradients, nullptr, nullptr, walk, together);
    for (int r = 0; r < together.count; ++r) {
      const int64_t row = together.rows[r];
      clear_rows(out, next, row, dim);
      copy(F32{}, reinterpret_cast<float*>(out.at(row, dim * 4)), together.gradient(r, dim), dim);
      next = row + 1;
    }
  }
  // The rows of long runs are written later.
  const int64_t last = entries[block.end - 1].row;
  clear_rows(out, next, last, dim);
  if (block.end == block.count) clear_rows(out, last + 1, block.num_rows, dim);
  block.num_long_runs = walk.num_long_runs;
}

void sum(const Gradients& gradients, const Entry* entries, int64_t begin, int64_t end, float* out) {
  Walk walk;
  walk.entries = entries;
  walk.count = end;
  walk.at = 0;
  walk.num_runs = 1;
  walk.starts[0] = static_cast<uint32_t>(begin);
  walk.starts[1] = static_cast<uint32_t>(end);
  Together together;
  choose_sums(gradients)(gradients, nullptr, nullptr, walk, together);
  copy(F32{}, out, together.gradient(0, gradients.dim), gradients.dim);
}

void add_rows(const float* rows, int64_t count, int64_t dim, float* out) {
  for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
    Vec sum = {};
    for (int64_t i = 0; i < count; ++i) sum += load(F32{}, rows + i * dim + column, extent);
    store(F32{}, out + column, sum, extent);
  });
}
