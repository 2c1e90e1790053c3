// Row optimizers on one row. Included once per instruction set, after vector.h.

JAXREC_INLINE Bits mix(Bits x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Random bits for the elements of a row from `column` on: the hash of rounding.py.
JAXREC_INLINE Bits random_bits(uint32_t row, uint32_t column, uint32_t step) {
  Bits columns;
  for (int i = 0; i < kWidth; ++i) columns[i] = column + static_cast<uint32_t>(i);
  Bits rows = mix(splat_bits(row * 0x9E3779B1u) ^ mix(splat_bits(step)));
  return mix(rows + columns * 0x85EBCA77u);
}

// The square roots of sums of squares plus `eps`, NaN for a sum that float does not hold: divided by
// infinity, a step is zero, and the row would silently never move again. An infinite sum times
// zero is NaN.
JAXREC_INLINE Vec shifted_root(Vec squares, float eps) {
  return square_root(squares) + (squares * 0.0f + eps);
}

JAXREC_INLINE Vec absolute(Vec x) { return as_floats(as_bits(x) & 0x7FFFFFFF); }

// A value of the 16-bit type T above or below x, as rounding.py chooses it: adding random bits
// below the last one that is kept, and cutting them off.
JAXREC_INLINE Vec round_at_random(F32, Vec x, Bits) { return x; }
JAXREC_INLINE Vec round_at_random(BF16, Vec x, Bits random) {
  Vec rounded = as_floats((as_bits(x) + (random >> 16)) & 0xFFFF0000);
  return select(absolute(x) <= 0x1.FEp127f, rounded, x);
}
JAXREC_INLINE Vec round_at_random(F16, Vec x, Bits random) {
  Vec size = absolute(x);
  Vec rounded = as_floats((as_bits(x) + (random >> 19)) & 0xFFFFE000);
  // Subnormal numbers are multiples of 2^-24 (and as such small enough for int32).
  Mask is_subnormal = size < 0x1p-14f;
  Vec units = select(is_subnormal, size * 0x1p24f, Vec{});
  Vec whole = __builtin_convertvector(__builtin_convertvector(units, Mask), Vec);
  Vec uniform = __builtin_convertvector(reinterpret_cast<Mask>(random >> 8), Vec) * 0x1p-24f;
  whole = select(uniform < units - whole, whole + 1.0f, whole);
  Bits sign = as_bits(x) & 0x80000000;
  rounded = select(is_subnormal, as_floats(as_bits(whole * 0x1p-24f) | sign), rounded);
  return select(size <= 65504.0f, rounded, x);
}

// Writes the elements of a new row that were kept, times `scale`, rounded at random if asked.
template <class T>
__attribute__((noinline)) void write_kept(typename T::Storage* row, uint32_t index,
                                          const Step& step, const float* kept, float scale,
                                          int64_t dim) {
  for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
    Vec x = load(F32{}, kept + column, Whole{}) * scale;
    if (T::kDroppedBits != 0 && step.stochastic) {
      x = round_at_random(T{}, x, random_bits(index, static_cast<uint32_t>(column), step.step));
    }
    store(T{}, row + column, x, extent);
  });
}

// Writes the elements of a new row. Keeps them until the row is complete where its norm is bounded,
// and where they are rounded at random: write_kept is compiled once, not for each optimizer.
template <class T>
struct RowWriter {
  typename T::Storage* row;
  uint32_t index;
  const Step& step;
  bool keeps;
  Vec squares;
  alignas(64) float kept[kMaxDim];

  JAXREC_MEMBER RowWriter(typename T::Storage* row, uint32_t index, const Step& step)
      : row(row),
        index(index),
        step(step),
        keeps(step.max_norm < __builtin_inff() || (T::kDroppedBits != 0 && step.stochastic)),
        squares{} {}

  template <class Extent>
  JAXREC_MEMBER void put(int64_t column, Vec x, Extent extent) {
    if (!keeps) return store(T{}, row + column, x, extent);
    squares += x * x;
    store(F32{}, kept + column, x, Whole{});
  }
  JAXREC_MEMBER void finish(int64_t dim) {
    if (!keeps) return;
    const float infinity = __builtin_inff(), sum = total(squares);
    const float norm = sum < infinity ? __builtin_sqrtf(sum) : __builtin_nanf("");
    const bool is_within = step.max_norm == infinity || norm <= step.max_norm;
    const float scale = is_within ? 1.0f : step.max_norm / norm;
    write_kept<T>(row, index, step, kept, scale, dim);
  }
};

// Rows whose gradients are applied together, so that the waits for one row's square root and
// quotient are filled with the others' work.
constexpr int kMostTogether = 16;
constexpr int64_t kFloatsTogether = 4096;

// Columns of a row in whole vectors.
JAXREC_INLINE int64_t whole_vectors(int64_t dim) { return (dim + kWidth - 1) / kWidth * kWidth; }

JAXREC_INLINE int rows_together(int64_t dim) {
  const int64_t columns = whole_vectors(dim);
  return columns * kMostTogether <= kFloatsTogether ? kMostTogether
                                                    : static_cast<int>(kFloatsTogether / columns);
}

// Some rows and their gradients, each in whole vectors with zeros behind its last column.
struct Together {
  int count;
  uint32_t rows[kMostTogether];
  alignas(64) float gradients[kFloatsTogether];

  JAXREC_MEMBER float* gradient(int row, int64_t dim) {
    return gradients + row * whole_vectors(dim);
  }
  JAXREC_MEMBER const float* gradient(int row, int64_t dim) const {
    return gradients + row * whole_vectors(dim);
  }
};

// The means of values(column, extent)^2 over each row, for all rows together.
template <class Values>
JAXREC_INLINE float mean_square(int64_t dim, const Values& values) {
  Vec squares = {};
  for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
    Vec x = values(column, extent);
    squares += x * x;
  });
  return total(squares) / static_cast<float>(dim);
}

template <class T>
JAXREC_INLINE typename T::Storage* row_at(const Table& table, uint32_t row) {
  return static_cast<typename T::Storage*>(table.rows) + row * table.dim;
}

template <class T>
void apply_sgd(const Table& table, const Step& step, const Together& together) {
  for (int r = 0; r < together.count; ++r) {
    auto* row = row_at<T>(table, together.rows[r]);
    const float* gradient = together.gradient(r, table.dim);
    RowWriter<T> writer(row, together.rows[r], step);
    for_each_vector(table.dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      Vec g = load(F32{}, gradient + column, Whole{});
      writer.put(column, load(T{}, row + column, extent) - step.rate * g, extent);
    });
    writer.finish(table.dim);
  }
}

template <class T>
void apply_adagrad(const Table& table, const Step& step, const Together& together) {
  for (int r = 0; r < together.count; ++r) {
    auto* row = row_at<T>(table, together.rows[r]);
    const float* gradient = together.gradient(r, table.dim);
    float* accumulator = step.first + together.rows[r] * table.dim;
    RowWriter<T> writer(row, together.rows[r], step);
    for_each_vector(table.dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      Vec g = load(F32{}, gradient + column, Whole{});
      Vec sum = load(F32{}, accumulator + column, extent) + g * g;
      store(F32{}, accumulator + column, sum, extent);
      Vec move = step.rate * g / shifted_root(sum, step.eps);
      writer.put(column, load(T{}, row + column, extent) - move, extent);
    });
    writer.finish(table.dim);
  }
}

template <class T>
void apply_rowwise_adagrad(const Table& table, const Step& step, const Together& together) {
  const int64_t dim = table.dim;
  const float l2 = step.decay == Decay::kL2 ? step.weight_decay : 0.0f;
  const float keep = step.decay == Decay::kDecoupled ? 1.0f - step.rate * step.weight_decay : 1.0f;
  auto gradient_of = [&](int r) JAXREC_ALWAYS {
    const auto* row = row_at<T>(table, together.rows[r]);
    const float* gradient = together.gradient(r, dim);
    return [=](int64_t column, auto extent) JAXREC_ALWAYS {
      Vec g = load(F32{}, gradient + column, Whole{});
      return l2 == 0.0f ? g : g + l2 * load(T{}, row + column, extent);
    };
  };
  float rates[kMostTogether];
  for (int r = 0; r < together.count; ++r) rates[r] = mean_square(dim, gradient_of(r));
  for (int r = 0; r < together.count; ++r) rates[r] += step.first[together.rows[r]];
  for (int r = 0; r < together.count; ++r) step.first[together.rows[r]] = rates[r];
  for (int r = 0; r < kMostTogether; r += kWidth) {
    Vec sums = load(F32{}, rates + r, Whole{});
    store(F32{}, rates + r, step.rate / shifted_root(sums, step.eps), Whole{});
  }
  for (int r = 0; r < together.count; ++r) {
    auto* row = row_at<T>(table, together.rows[r]);
    auto gradient = gradient_of(r);
    RowWriter<T> writer(row, together.rows[r], step);
    for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      Vec x = keep * load(T{}, row + column, extent);
      writer.put(column, x - rates[r] * gradient(column, extent), extent);
    });
    writer.finish(dim);
  }
}

// Adam and, if `kPartial`, its form with one second moment a row.
template <class T, bool kPartial>
void apply_adam(const Table& table, const Step& step, const Together& together) {
  const int64_t dim = table.dim;
  for (int r = 0; r < together.count; ++r) {
    const uint32_t index = together.rows[r];
    auto* row = row_at<T>(table, index);
    const float* gradient = together.gradient(r, dim);
    float share1 = step.share1, share2 = step.share2;
    if (step.counts_rows) {
      float count = step.counts[index] += 1.0f;
      share1 = step.b1 == 0.0f ? 1.0f : -__builtin_expm1f(count * step.log_b1);
      share2 = step.b2 == 0.0f ? 1.0f : -__builtin_expm1f(count * step.log_b2);
    }
    float* first = step.first + index * dim;
    float* second = step.second + (kPartial ? index : index * dim);
    if (kPartial) {
      float mean = mean_square(dim, [=](int64_t column, auto) JAXREC_ALWAYS {
        return load(F32{}, gradient + column, Whole{});
      });
      *second = step.b2 * *second + step.rest2 * mean;
    }
    RowWriter<T> writer(row, index, step);
    for_each_vector(dim, [&](int64_t column, auto extent) JAXREC_ALWAYS {
      Vec g = load(F32{}, gradient + column, Whole{}), w = load(T{}, row + column, extent);
      Vec m = step.b1 * load(F32{}, first + column, extent) + step.rest1 * g;
      store(F32{}, first + column, m, extent);
      Vec v;
      if (kPartial) {
        v = splat(*second);
      } else {
        v = step.b2 * load(F32{}, second + column, extent) + step.rest2 * (g * g);
        store(F32{}, second + column, v, extent);
      }
      Vec direction = m / share1 / shifted_root(v / share2, step.eps);
      writer.put(column, w - step.rate * (direction + step.weight_decay * w), extent);
    });
    writer.finish(dim);
  }
}

// Updates some rows by their gradients.
typedef void (*ApplyRows)(const Table&, const Step&, const Together&);

template <class T>
ApplyRows rule_for(Rule rule) {
  switch (rule) {
    case Rule::kSgd: return apply_sgd<T>;
    case Rule::kAdagrad: return apply_adagrad<T>;
    case Rule::kRowwiseAdagrad: return apply_rowwise_adagrad<T>;
    case Rule::kAdam: return apply_adam<T, false>;
    case Rule::kPartialRowwiseAdam: return apply_adam<T, true>;
  }
  return nullptr;
}

ApplyRows choose_rule(Type type, Rule rule) {
  switch (type) {
    case Type::kF32: return rule_for<F32>(rule);
    case Type::kBF16: return rule_for<BF16>(rule);
    case Type::kF16: return rule_for<F16>(rule);
  }
  return nullptr;
}

void apply(const Table& table, const Step& step, uint32_t row, const float* gradient) {
  Together together;
  together.count = 1;
  together.rows[0] = row;
  float* kept = together.gradient(0, table.dim);
  store(F32{}, kept + whole_vectors(table.dim) - kWidth, Vec{}, Whole{});
  copy(F32{}, kept, gradient, table.dim);
  choose_rule(table.type, step.rule)(table, step, together);
}
