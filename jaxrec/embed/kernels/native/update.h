// Sums of gradients, and the update of the rows in a stretch of the sorted lookups. Included once
// per instruction set, after sums.h and optimizers.h.

// How many lookups before their turn the rows of gradients and of the table are asked for.
constexpr int64_t kGradientsAhead = 8;
constexpr int64_t kUpdatesAhead = 24;

JAXREC_INLINE int64_t bag_of(const Gradients& gradients, uint32_t value) {
  return gradients.bags == nullptr ? value : gradients.bags[value];
}

// Adds the gradients of entries [begin, end); calls ask(i) before each is read.
template <class G, class Sums, class Ask>
JAXREC_INLINE void add_gradients(const Gradients& gradients, const Entry* entries, int64_t begin,
                                 int64_t end, G type, Sums& sums, const Ask& ask) {
  const int64_t dim = Sums::fixed(gradients.dim);
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename G::Storage));
  const bool plain = gradients.scales == nullptr && !(gradients.bound < __builtin_inff());
  sums.clear(dim);
  for (int64_t i = begin; i < end; ++i) {
    ask(i);
    const uint32_t value = entries[i].value;
    const char* place = gradients.rows->at(bag_of(gradients, value), row_bytes);
    const typename G::Storage* row = reinterpret_cast<const typename G::Storage*>(place);
    if (plain) {
      sums.add(type, row, AsIs{}, dim);
    } else {
      float scale = gradients.scales == nullptr ? 1.0f : gradients.scales[value];
      sums.add(type, row, ClippedAndScaled{gradients.bound, scale}, dim);
    }
  }
}

// Asks for the gradient of an entry.
template <class G>
JAXREC_INLINE void ask_gradient(const Gradients& gradients, const Entry& entry, int64_t dim) {
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename G::Storage));
  prefetch<0>(gradients.rows->at(bag_of(gradients, entry.value), row_bytes), row_bytes);
}

// Asks for a row and its state, to write them.
JAXREC_INLINE void ask_row(const Table& table, const Step& step, uint32_t row, int64_t dim) {
  char* rows = static_cast<char*>(table.rows);
  if (table.type == Type::kF32) {
    prefetch<1>(rows + row * dim * 4, dim * 4);
  } else {
    prefetch<1>(rows + row * dim * 2, dim * 2);
  }
  switch (step.rule) {
    case Rule::kSgd: break;
    case Rule::kRowwiseAdagrad:
      prefetch<1>(step.first + row, 4);
      break;
    case Rule::kAdagrad:
      prefetch<1>(step.first + row * dim, dim * 4);
      break;
    case Rule::kAdam:
      prefetch<1>(step.first + row * dim, dim * 4);
      prefetch<1>(step.second + row * dim, dim * 4);
      break;
    case Rule::kPartialRowwiseAdam:
      prefetch<1>(step.first + row * dim, dim * 4);
      prefetch<1>(step.second + row, 4);
      break;
  }
  if (step.counts_rows) prefetch<1>(step.counts + row, 4);
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

template <class G, class Sums>
void update_runs(UpdateBlock& block, G type, Sums& sums) {
  const Entry* entries = block.entries;
  const int64_t count = block.count;
  const Gradients gradients = block.gradients;
  const Table table = block.table;
  const Step step = block.step;
  const int64_t dim = Sums::fixed(table.dim);
  const ApplyRows apply_rows = choose_rule(table.type, step.rule);
  const int most_together = rows_together(dim);
  // Rows are read when all that are applied together have their gradients.
  const int64_t rows_ahead = kUpdatesAhead + most_together;

  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    if (i + kGradientsAhead < count) ask_gradient<G>(gradients, entries[i + kGradientsAhead], dim);
    const int64_t later = i + rows_ahead;
    if (later < count && entries[later].row != entries[later - 1].row) {
      ask_row(table, step, entries[later].row, dim);
    }
  };

  int64_t i = block.begin;
  // A run that began before belongs to the stretch it began in.
  while (i > 0 && i < block.end && entries[i].row == entries[i - 1].row) ++i;
  for (int64_t j = i; j < i + rows_ahead && j < count; ++j) {
    ask_row(table, step, entries[j].row, dim);
  }
  for (int64_t j = i; j < i + kGradientsAhead && j < count; ++j) {
    ask_gradient<G>(gradients, entries[j], dim);
  }
  Together together;
  together.count = 0;
  while (i < block.end) {
    const int64_t end = run_end(entries, i, count);
    if (end - i > kPiece) {
      block.long_runs[block.num_long_runs++] = {i, end};
    } else {
      add_gradients(gradients, entries, i, end, type, sums, ask);
      sums.put(Type::kF32, together.gradients + together.count * dim, 1.0f, dim);
      together.rows[together.count++] = entries[i].row;
      if (together.count == most_together) {
        apply_rows(table, step, together);
        together.count = 0;
      }
    }
    i = end;
  }
  if (together.count > 0) apply_rows(table, step, together);
}

void update(UpdateBlock& block) {
  with_type(block.gradients.type, [&](auto gradient_type) JAXREC_ALWAYS {
    with_sums(block.table.dim, [&](auto& sums) JAXREC_ALWAYS {
      update_runs(block, gradient_type, sums);
    });
  });
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

template <class G, class Sums>
void sum_runs_of(SumBlock& block, G type, Sums& sums) {
  const Entry* entries = block.entries;
  const Gradients gradients = block.gradients;
  const Rows& out = *block.sums;
  const int64_t count = block.count, dim = Sums::fixed(gradients.dim);

  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    if (i + kGradientsAhead < count) ask_gradient<G>(gradients, entries[i + kGradientsAhead], dim);
  };

  int64_t i = block.begin;
  // A run that began before belongs to the stretch it began in.
  while (i > 0 && i < block.end && entries[i].row == entries[i - 1].row) ++i;
  for (int64_t j = i; j < i + kGradientsAhead && j < count; ++j) {
    ask_gradient<G>(gradients, entries[j], dim);
  }
  int64_t next = i > 0 ? entries[i - 1].row + 1 : 0;
  while (i < block.end) {
    const int64_t row = entries[i].row, end = run_end(entries, i, count);
    clear_rows(out, next, row, dim);
    if (end - i > kPiece) {
      block.long_runs[block.num_long_runs++] = {i, end};
    } else {
      add_gradients(gradients, entries, i, end, type, sums, ask);
      sums.put(Type::kF32, out.at(row, dim * 4), 1.0f, dim);
    }
    next = row + 1;
    i = end;
  }
  if (block.end == count) clear_rows(out, next, block.num_rows, dim);
}

void sum_runs(SumBlock& block) {
  with_type(block.gradients.type, [&](auto type) JAXREC_ALWAYS {
    with_sums(block.gradients.dim, [&](auto& sums) JAXREC_ALWAYS {
      sum_runs_of(block, type, sums);
    });
  });
}

template <class G, class Sums>
void sum_entries(const Gradients& gradients, const Entry* entries, int64_t begin, int64_t end,
                 float* out, G type, Sums& sums) {
  auto ask = [&](int64_t i) JAXREC_ALWAYS {
    if (i + kGradientsAhead < end) ask_gradient<G>(gradients, entries[i + kGradientsAhead], gradients.dim);
  };
  add_gradients(gradients, entries, begin, end, type, sums, ask);
  sums.put(Type::kF32, out, 1.0f, Sums::fixed(gradients.dim));
}

void sum(const Gradients& gradients, const Entry* entries, int64_t begin, int64_t end, float* out) {
  with_type(gradients.type, [&](auto type) JAXREC_ALWAYS {
    with_sums(gradients.dim, [&](auto& sums) JAXREC_ALWAYS {
      sum_entries(gradients, entries, begin, end, out, type, sums);
    });
  });
}

void add_rows(const float* rows, int64_t count, int64_t dim, float* out) {
  for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
    Vec sum = {};
    for (int64_t i = 0; i < count; ++i) sum += load(F32{}, rows + i * dim + column, extent);
    store(F32{}, out + column, sum, extent);
  });
}
