// Dot products of all pairs of a sample's vectors, and their gradients. Included once per instruction
// set, after vector.h.

// The tile of a product: kPairRows vectors times kPairVectors * kWidth others. Its sums fit in
// registers.
constexpr int kPairRows = 4;
constexpr int kPairVectors = JAXREC_VECTOR_BYTES == 64 ? 4 : 2;
static_assert(kWidth <= kMostLanes, "the scratch of multiply_pairs has room for so many");

// Writes four elements of four vectors, `dim` apart, transposed, `width` apart.
JAXREC_INLINE void transpose4(const float* vectors, int64_t dim, float* out, int64_t width) {
  typedef float UnalignedVec4 __attribute__((vector_size(16), aligned(4), may_alias));
  const auto row = [&](int i) -> Vec4 {
    return *reinterpret_cast<const UnalignedVec4*>(vectors + i * dim);
  };
  const Vec4 a = row(0), b = row(1), c = row(2), d = row(3);
  const Vec4 ab0 = {a[0], b[0], a[1], b[1]}, ab2 = {a[2], b[2], a[3], b[3]};
  const Vec4 cd0 = {c[0], d[0], c[1], d[1]}, cd2 = {c[2], d[2], c[3], d[3]};
  const Vec4 columns[4] = {{ab0[0], ab0[1], cd0[0], cd0[1]}, {ab0[2], ab0[3], cd0[2], cd0[3]},
                           {ab2[0], ab2[1], cd2[0], cd2[1]}, {ab2[2], ab2[3], cd2[2], cd2[3]}};
  for (int i = 0; i < 4; ++i) *reinterpret_cast<UnalignedVec4*>(out + i * width) = columns[i];
}

// Writes the vectors of a sample, `[n, dim]`, as `[dim, width]`.
JAXREC_INLINE void transpose(const float* vectors, int64_t n, int64_t dim, int64_t width,
                             float* out) {
  for (int64_t d = 0; d < dim; d += 4) {
    const int64_t whole = d + 4 <= dim ? n / 4 * 4 : 0;
    for (int64_t i = 0; i < whole; i += 4) {
      transpose4(vectors + i * dim + d, dim, out + d * width + i, width);
    }
    for (int64_t e = d; e < d + 4 && e < dim; ++e) {
      for (int64_t i = whole; i < n; ++i) out[e * width + i] = vectors[i * dim + e];
    }
  }
}

// The products of `kRows` vectors with `kVectors` times kWidth others, which are transposed. Rows of
// `others` and of `out` are `width` long.
template <int kRows, int kVectors>
JAXREC_INLINE void multiply_block(const float* vectors, const float* others, int64_t dim,
                                  int64_t width, float* out) {
  Vec sums[kRows][kVectors] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Vec other[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      other[v] = load(F32{}, others + d * width + v * kWidth, Whole{});
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec element = splat(vectors[r * dim + d]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] += element * other[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store(F32{}, out + r * width + v * kWidth, sums[r][v], Whole{});
    }
  }
}

// The products of `kRows` vectors with `count` others, and some that are not used.
template <int kRows>
JAXREC_INLINE void multiply_rows(const float* vectors, const float* others, int64_t count,
                                 int64_t dim, int64_t width, float* out) {
  int64_t j = 0;
  for (; count - j > (kPairVectors - 1) * kWidth; j += kPairVectors * kWidth) {
    multiply_block<kRows, kPairVectors>(vectors, others + j, dim, width, out + j);
  }
  const int64_t left = count - j;
  if (left > 2 * kWidth) return multiply_block<kRows, 3>(vectors, others + j, dim, width, out + j);
  if (left > kWidth) return multiply_block<kRows, 2>(vectors, others + j, dim, width, out + j);
  if (left > 0) return multiply_block<kRows, 1>(vectors, others + j, dim, width, out + j);
}

// The products of the vectors [begin, end) with those after each, at column j of row i - begin.
JAXREC_INLINE void multiply_panel(const float* vectors, const float* others, int64_t begin,
                                  int64_t end, int64_t n, int64_t dim, int64_t width, float* out) {
  int64_t i = begin;
  for (; i + kPairRows <= end; i += kPairRows) {
    multiply_rows<kPairRows>(vectors + i * dim, others + i + 1, n - i - 1, dim, width,
                             out + (i - begin) * width + i + 1);
  }
  for (; i < end; ++i) {
    multiply_rows<1>(vectors + i * dim, others + i + 1, n - i - 1, dim, width,
                     out + (i - begin) * width + i + 1);
  }
}

void multiply_pairs(const PairBlock& block, float* scratch) {
  const int64_t n = block.num_vectors, dim = block.dim, pairs = block.num_pairs();
  const int64_t width = n + kWidth;  // What is read past the end of a row is not used.
  float* const others = scratch;
  float* const panel = others + dim * width;
  for (int64_t sample = 0; sample < block.num_samples; ++sample) {
    const float* vectors = block.vectors + sample * n * dim;
    float* out = block.products + sample * pairs;
    float* const end_of_out = out + pairs;
    transpose(vectors, n, dim, width, others);
    for (int64_t begin = 0; begin < n; begin += kPanel) {
      const int64_t end = begin + kPanel < n ? begin + kPanel : n;
      multiply_panel(vectors, others, begin, end, n, dim, width, panel);
      for (int64_t i = begin; i < end; ++i) {
        const float* row = panel + (i - begin) * width + i + 1;
        const int64_t count = n - 1 - i;
        // What is stored past the end of a row is overwritten by the next.
        int64_t j = 0;
        for (; j < count && end_of_out - out - j >= kWidth; j += kWidth) {
          store(F32{}, out + j, load(F32{}, row + j, Whole{}), Whole{});
        }
        if (j < count) copy(F32{}, out + j, row + j, count - j);
        out += count;
      }
    }
  }
}

// The gradients of `kRows` vectors from `first` on, in the columns of `kVectors` loads: for each the
// sum of the others times the gradients of their pairs.
template <int kRows, int kVectors, class Extent>
JAXREC_INLINE void sum_block(const float* vectors, const float* gradient, int64_t first, int64_t n,
                             int64_t dim, float* out, Extent extent) {
  Vec sums[kRows][kVectors] = {};
  // pair_of(r) is the pair of vector j and of vector first + r.
  const auto add = [&](int64_t j, const auto& pair_of) JAXREC_ALWAYS {
    Vec other[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      other[v] = load(F32{}, vectors + j * dim + v * kWidth, extent);
    }
    for (int r = 0; r < kRows; ++r) {
      if (first + r == j) continue;
      const Vec factor = splat(gradient[pair_of(r)]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * other[v];
    }
  };
  int64_t before = first - 1;
  for (int64_t j = 0; j < first; ++j) {
    add(j, [&](int r) { return before + r; });
    before += n - 2 - j;
  }
  int64_t own[kRows];  // own[r] + j is the pair (first + r, j).
  for (int64_t r = 0, i = first; r < kRows; ++r, ++i) own[r] = i * (2 * n - i - 1) / 2 - i - 1;
  for (int q = 0; q < kRows; ++q) {
    add(first + q, [&](int r) { return r < q ? own[r] + first + q : own[q] + first + r; });
  }
  for (int64_t j = first + kRows; j < n; ++j) {
    add(j, [&](int r) { return own[r] + j; });
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      store(F32{}, out + (first + r) * dim + v * kWidth, sums[r][v], extent);
    }
  }
}

// The gradients of a sample's vectors, in some columns.
template <int kVectors, class Extent>
JAXREC_INLINE void sum_columns(const float* vectors, const float* gradient, int64_t n, int64_t dim,
                               float* out, Extent extent) {
  int64_t i = 0;
  for (; i + kPairRows <= n; i += kPairRows) {
    sum_block<kPairRows, kVectors>(vectors, gradient, i, n, dim, out, extent);
  }
  for (; i < n; ++i) sum_block<1, kVectors>(vectors, gradient, i, n, dim, out, extent);
}

void sum_pairs(const PairGradientBlock& block) {
  const int64_t n = block.num_vectors, dim = block.dim;
  for (int64_t sample = 0; sample < block.num_samples; ++sample) {
    const float* gradient = block.gradient + sample * block.num_pairs();
    const float* vectors = block.vectors + sample * n * dim;
    float* out = block.out + sample * n * dim;
    int64_t left = dim;
    const auto next = [&](int64_t columns) {
      left -= columns;
      vectors += columns;
      out += columns;
    };
    while (left >= kPairVectors * kWidth) {
      sum_columns<kPairVectors>(vectors, gradient, n, dim, out, Whole{});
      next(kPairVectors * kWidth);
    }
    while (left >= kWidth) {
      sum_columns<1>(vectors, gradient, n, dim, out, Whole{});
      next(kWidth);
    }
    if (left > 0) sum_columns<1>(vectors, gradient, n, dim, out, Part{static_cast<int>(left)});
  }
}
