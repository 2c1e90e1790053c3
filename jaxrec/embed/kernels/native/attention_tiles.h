// Pointwise attention of one head within one row, tile by tile, and its gradients. Included once per
// instruction set, after pairs.h.

// Rows of a tile's matrices are as long.
constexpr int64_t kTile = kAttentionTile;
static_assert(kTile % kWidth == 0, "rows of a tile's matrices are whole vectors");

// e^x for x of at most 88, to 2 ulp; 0 or nearly so below -87.
JAXREC_INLINE Vec exponential(Vec x) {
  x = minimum(maximum(x, splat(-87.0f)), splat(88.0f));
  // Adding this leaves the integer nearest to x / ln 2 in the last bits.
  const Vec shift = splat(12582912.0f);
  const Vec shifted = x * splat(1.44269504f) + shift;
  const Vec whole = shifted - shift;
  Vec rest = x - whole * splat(0.693359375f);
  rest = rest + whole * splat(2.12194440e-4f);
  // Cephes' polynomial for expf.
  Vec sum = splat(1.9875691500e-4f);
  sum = sum * rest + splat(1.3981999507e-3f);
  sum = sum * rest + splat(8.3334519073e-3f);
  sum = sum * rest + splat(4.1665795894e-2f);
  sum = sum * rest + splat(1.6666665459e-1f);
  sum = sum * rest + splat(5.0000001201e-1f);
  sum = sum * rest * rest + rest + splat(1.0f);
  const Bits exponent = (as_bits(shifted) - as_bits(shift) + splat_bits(127)) << 23;
  return sum * as_floats(exponent);
}

JAXREC_INLINE Vec sigmoid(Vec x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

// A matrix whose elements (i, k) are read one by one.
struct Factor {
  const float* elements;
  int64_t row_step, step;
};

// out[i][columns] += sum over k of factor(i, k) * rows[k][columns], for `kRows` rows i and the
// columns of `kVectors` vectors. Rows of `rows` are `stride` apart, those of `out` `out_stride`.
template <int kRows, int kVectors, class Extent>
JAXREC_INLINE void add_block(Factor factor, const float* rows, int64_t stride, int64_t count,
                             float* out, int64_t out_stride, Extent extent) {
  Vec sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = load(F32{}, out + r * out_stride + v * kWidth, extent);
    }
  }
  const float* element = factor.elements;
  for (int64_t k = 0; k < count; ++k, element += factor.step, rows += stride) {
    Vec row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = load(F32{}, rows + v * kWidth, extent);
    for (int r = 0; r < kRows; ++r) {
      const Vec x = splat(element[r * factor.row_step]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x * row[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store(F32{}, out + r * out_stride + v * kWidth, sums[r][v], extent);
    }
  }
}

template <int kVectors, class Extent>
JAXREC_INLINE void add_columns(Factor factor, int64_t num_rows, const float* rows, int64_t stride,
                               int64_t count, float* out, int64_t out_stride, Extent extent) {
  constexpr int kRows = JAXREC_VECTOR_BYTES == 64 && kVectors <= 2 ? 8 : 4;
  int64_t i = 0;
  const auto at = [&](int64_t row) -> Factor {
    return {factor.elements + row * factor.row_step, factor.row_step, factor.step};
  };
  for (; i + kRows <= num_rows; i += kRows) {
    add_block<kRows, kVectors>(at(i), rows, stride, count, out + i * out_stride, out_stride, extent);
  }
  for (; i < num_rows; ++i) {
    add_block<1, kVectors>(at(i), rows, stride, count, out + i * out_stride, out_stride, extent);
  }
}

// out += factor * rows, where `out` is [num_rows, columns] and `rows` [count, columns].
// Not inlined: it has a loop for each number of rows and vectors, and a call costs nothing beside it.
void add_product(Factor factor, int64_t num_rows, const float* rows, int64_t stride, int64_t count,
                 int64_t columns, float* out, int64_t out_stride) {
  constexpr int64_t kMost = kPairVectors * kWidth;
  int64_t column = 0;
  for (; column + kMost <= columns; column += kMost) {
    add_columns<kPairVectors>(factor, num_rows, rows + column, stride, count, out + column,
                              out_stride, Whole{});
  }
  if (kPairVectors > 2 && column + 2 * kWidth <= columns) {
    add_columns<2>(factor, num_rows, rows + column, stride, count, out + column, out_stride,
                   Whole{});
    column += 2 * kWidth;
  }
  for (; column + kWidth <= columns; column += kWidth) {
    add_columns<1>(factor, num_rows, rows + column, stride, count, out + column, out_stride,
                   Whole{});
  }
  if (column < columns) {
    add_columns<1>(factor, num_rows, rows + column, stride, count, out + column, out_stride,
                   Part{static_cast<int>(columns - column)});
  }
}

// Writes `count` rows of `dim` elements, `stride` apart, as `[dim, kTile]`, with zeros behind them.
void transpose_rows(const float* rows, int64_t stride, int64_t count, int64_t dim, float* out) {
  if (count < kTile) __builtin_memset(out, 0, dim * kTile * sizeof(float));
  const int64_t whole = count / 4 * 4;
  for (int64_t d = 0; d + 4 <= dim; d += 4) {
    for (int64_t i = 0; i < whole; i += 4) {
      transpose4(rows + i * stride + d, stride, out + d * kTile + i, kTile);
    }
  }
  for (int64_t d = 0; d < dim; ++d) {
    for (int64_t i = d < dim / 4 * 4 ? whole : 0; i < count; ++i) {
      out[d * kTile + i] = rows[i * stride + d];
    }
  }
}

typedef int32_t Ints32 __attribute__((vector_size(JAXREC_VECTOR_BYTES)));
JAXREC_INLINE Ints32 splat_ints(int32_t x) { return x - Ints32{}; }

// The keys of a tile that a query sees, by their number in the tile.
struct Seen {
  int32_t first, last, group, own;

  JAXREC_MEMBER bool all(int32_t count) const { return first <= 0 && last >= count - 1; }
};

// Lanes of the keys `column`, `column` + 1, ... that a query sees.
JAXREC_INLINE Mask seen_lanes(const Seen& seen, int32_t column) {
  Ints32 lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  const Ints32 key = lanes + column;
  const Mask near = (key >= splat_ints(seen.first)) & (key <= splat_ints(seen.last));
  return near | ((key >= splat_ints(seen.group)) & (key <= splat_ints(seen.own)));
}

// Where the tile's arrays of a row and head lie.
struct RowPart {
  const AttentionRow& row;
  int64_t query, num_queries;  // First query of the tile, counted in the array, and their number.
  int64_t key, num_keys;
};

JAXREC_INLINE Seen seen_by(const RowPart& part, int64_t a) {
  const KeyRanges& ranges = part.row.ranges;
  const int64_t i = part.query + a;
  const auto relative = [&](const int32_t* positions) -> int32_t {
    const int64_t place = positions[i] - part.key;
    return static_cast<int32_t>(place < -1 ? -1 : place > kTile ? kTile : place);
  };
  Seen seen = {relative(ranges.first), relative(ranges.last), kTile, -1};
  if (ranges.group != nullptr) {
    seen.group = relative(ranges.group);
    seen.own = relative(ranges.own);
  }
  // No query sees the columns behind the tile's last key.
  const int32_t end = static_cast<int32_t>(part.num_keys) - 1;
  seen.last = seen.last < end ? seen.last : end;
  seen.own = seen.own < end ? seen.own : end;
  return seen;
}

// The first bias of a tile's query: of its first key, with the others behind it.
JAXREC_INLINE int64_t bias_place(const RowPart& part, int64_t a) {
  const AttentionRow& row = part.row;
  int64_t own = row.ranges.own[part.query + a];
  const int64_t last = row.first_key + row.num_keys - 1;
  own = own < row.first_key ? row.first_key : own > last ? last : own;
  return row.bias_origin + part.key - own;
}

// Sets scores to alpha q k + bias.
JAXREC_INLINE void score(const RowPart& part, const float* keys, float* scores) {
  const AttentionRow& row = part.row;
  __builtin_memset(scores, 0, part.num_queries * kTile * sizeof(float));
  const int64_t columns = (part.num_keys + kWidth - 1) / kWidth * kWidth;
  const Factor queries = {row.query + part.query * row.query_stride, row.query_stride, 1};
  add_product(queries, part.num_queries, keys, kTile, row.dim, columns, scores, kTile);
}

// Calls body(score of alpha q k + bias, lanes that are seen, place) for each vector of scores.
template <class Body>
JAXREC_INLINE void for_each_score(const RowPart& part, const float* scores, const Body& body) {
  const AttentionRow& row = part.row;
  const Vec alpha = splat(row.alpha);
  for (int64_t a = 0; a < part.num_queries; ++a) {
    const Seen seen = seen_by(part, a);
    const bool sees_all = seen.all(static_cast<int32_t>(kTile));
    const float* bias = row.bias == nullptr ? nullptr : row.bias + bias_place(part, a);
    for (int64_t b = 0; b < part.num_keys; b += kWidth) {
      const int64_t place = a * kTile + b;
      Vec x = load(F32{}, scores + place, Whole{}) * alpha;
      if (bias != nullptr) x += load(F32{}, bias + b, Whole{});
      const Mask mask = sees_all ? Mask{} - 1 : seen_lanes(seen, static_cast<int32_t>(b));
      body(x, mask, place);
    }
  }
}

// Calls body(part) for the tiles of a row in which some query sees some key: by blocks of keys.
template <class Start, class Body, class End>
JAXREC_INLINE void for_each_tile(const AttentionRow& row, const Start& start, const Body& body,
                                 const End& end) {
  for (int64_t key = 0; key < row.num_keys; key += kTile) {
    const int64_t num_keys = row.num_keys - key < kTile ? row.num_keys - key : kTile;
    const int64_t first_key = row.first_key + key;
    start(first_key, num_keys);
    for (int64_t query = 0; query < row.num_queries; query += kTile) {
      const int64_t left = row.num_queries - query;
      const RowPart part = {row, row.first_query + query, left < kTile ? left : kTile, first_key,
                            num_keys};
      const Reach& reach = row.reaches[query / kTile];
      const int64_t last_key = first_key + num_keys - 1;
      const bool is_near = reach.first <= last_key && reach.last >= first_key;
      const bool is_group = reach.group <= last_key && reach.own >= first_key;
      if (is_near || is_group) body(part);
    }
    end(first_key, num_keys);
  }
}

void attend_row(const AttentionRow& row, float* scratch) {
  float* const keys = scratch;
  float* const scores = keys + row.dim * kTile;
  for_each_tile(
      row,
      [&](int64_t key, int64_t count) JAXREC_ALWAYS {
        transpose_rows(row.key + key * row.query_stride, row.query_stride, count, row.dim, keys);
      },
      [&](const RowPart& part) JAXREC_ALWAYS {
        score(part, keys, scores);
        for_each_score(part, scores, [&](Vec x, Mask mask, int64_t place) JAXREC_ALWAYS {
          store(F32{}, scores + place, select(mask, x * sigmoid(x), Vec{}), Whole{});
        });
        add_product({scores, kTile, 1}, part.num_queries, row.value + part.key * row.value_stride,
                    row.value_stride, part.num_keys, row.value_dim,
                    row.out + part.query * row.value_stride, row.value_stride);
      },
      [](int64_t, int64_t) JAXREC_ALWAYS {});
}

void attend_row_gradients(const AttentionRow& row, float* scratch) {
  float* const keys = scratch;
  float* const values = keys + row.dim * kTile;
  float* const scores = values + row.value_dim * kTile;
  float* const slopes = scores + kTile * kTile;
  for_each_tile(
      row,
      [&](int64_t key, int64_t count) JAXREC_ALWAYS {
        transpose_rows(row.key + key * row.query_stride, row.query_stride, count, row.dim, keys);
        transpose_rows(row.value + key * row.value_stride, row.value_stride, count, row.value_dim,
                       values);
      },
      [&](const RowPart& part) JAXREC_ALWAYS {
        const int64_t queries = part.num_queries, count = part.num_keys;
        const float* gradient = row.gradient + part.query * row.value_stride;
        score(part, keys, scores);
        __builtin_memset(slopes, 0, queries * kTile * sizeof(float));
        const int64_t columns = (count + kWidth - 1) / kWidth * kWidth;
        add_product({gradient, row.value_stride, 1}, queries, values, kTile, row.value_dim, columns,
                    slopes, kTile);
        for_each_score(part, scores, [&](Vec x, Mask mask, int64_t place) JAXREC_ALWAYS {
          const Vec gate = sigmoid(x);
          const Vec slope = gate * (splat(1.0f) + x * (splat(1.0f) - gate));
          const Vec given = load(F32{}, slopes + place, Whole{});
          store(F32{}, scores + place, select(mask, x * gate, Vec{}), Whole{});
          store(F32{}, slopes + place, select(mask, given * slope, Vec{}), Whole{});
        });
        add_product({scores, 1, kTile}, count, gradient, row.value_stride, queries, row.value_dim,
                    row.of_value + part.key * row.value_stride, row.value_stride);
        if (row.of_bias != nullptr) {
          for (int64_t a = 0; a < queries; ++a) {
            float* const of_bias = row.of_bias + bias_place(part, a);
            for (int64_t b = 0; b < count; b += kWidth) {
              const Vec sum = load(F32{}, of_bias + b, Whole{});
              store(F32{}, of_bias + b, sum + load(F32{}, slopes + a * kTile + b, Whole{}),
                    Whole{});
            }
          }
        }
        const Vec alpha = splat(row.alpha);
        for (int64_t i = 0; i < queries * kTile; i += kWidth) {
          store(F32{}, slopes + i, load(F32{}, slopes + i, Whole{}) * alpha, Whole{});
        }
        add_product({slopes, 1, kTile}, count, row.query + part.query * row.query_stride,
                    row.query_stride, queries, row.dim, row.of_key + part.key * row.query_stride,
                    row.query_stride);
        add_product({slopes, kTile, 1}, queries, row.key + part.key * row.query_stride,
                    row.query_stride, count, row.dim, row.of_query + part.query * row.query_stride,
                    row.query_stride);
      },
      [](int64_t, int64_t) JAXREC_ALWAYS {});
}
