#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace jaxrec {
namespace {

// Pairs of a piece: so many that waking a thread for it pays off.
constexpr int64_t kPiecePairs = 1 << 14;
// Pieces of a head. Each has a table of its own for the gradient of the bias.
constexpr int64_t kMostPieces = 64;

struct Span {
  int64_t first, count;
};

// Cuts offsets to what the array has.
std::vector<Span> spans(const int32_t* offsets, int64_t num_rows, int64_t num_elements) {
  std::vector<Span> spans;
  spans.reserve(num_rows);
  int64_t first = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t end = std::min<int64_t>(std::max<int64_t>(offsets[row + 1], first), num_elements);
    spans.push_back({first, end - first});
    first = end;
  }
  return spans;
}

// The rows of a call, what their blocks of queries reach, and how they are cut into pieces.
class Plan {
 public:
  explicit Plan(const Attention& attention)
      : attention_(attention),
        queries_(spans(attention.query_offsets, attention.num_rows, attention.num_queries)),
        keys_(spans(attention.key_offsets, attention.num_rows, attention.num_keys)) {
    int64_t pairs = 0;
    for (int64_t row = 0; row < attention.num_rows; ++row) {
      longest_ = std::max(longest_, keys_[row].count);
      pairs += cost(row);
      first_reach_.push_back(reaches_.size());
      for (int64_t i = 0; i < queries_[row].count; i += kAttentionTile) {
        reaches_.push_back(reach(queries_[row].first + i,
                                 std::min(queries_[row].count - i, kAttentionTile)));
      }
    }
    const int64_t most = std::max(kPiecePairs, pairs / kMostPieces);
    int64_t sum = 0, first = 0;
    for (int64_t row = 0; row < attention.num_rows; ++row) {
      sum += cost(row);
      if (sum < most && row + 1 < attention.num_rows) continue;
      pieces_.push_back({first, row + 1 - first});
      first = row + 1;
      sum = 0;
    }
    is_small_ = pairs * attention.heads <= kPiecePairs;
    if (attention.bias != nullptr) spread_bias();
  }

  int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }
  // Floats of a table by the place of the key minus that of the query.
  int64_t bias_width() const { return 2 * longest_ + 2 * kAttentionTile; }

  // Calls work(row, piece, head) for the rows of each piece and head, on several threads.
  template <class Work>
  void run(Team& team, const Work& work) const {
    const int64_t heads = attention_.heads;
    team.run(num_pieces() * heads, [&](int64_t i) {
      const int64_t piece = i / heads, head = i % heads;
      for (int64_t n = 0; n < pieces_[piece].count; ++n) {
        const int64_t row = pieces_[piece].first + n;
        if (queries_[row].count > 0 && keys_[row].count > 0) work(part(row, head), piece, head);
      }
    }, is_small_);
  }

  // Adds a head's gradient by place to that by distance.
  void sum_bias(const float* by_place, int64_t head, float* of_bias) const {
    for (int64_t i = 0; i < bias_width(); ++i) {
      of_bias[distance(i) * attention_.heads + head] += by_place[i];
    }
  }

 private:
  int64_t cost(int64_t row) const { return queries_[row].count * keys_[row].count; }

  int64_t distance(int64_t place) const {
    return std::min(std::max<int64_t>(longest_ - place, 0), attention_.distances - 1);
  }

  void spread_bias() {
    const int64_t width = bias_width(), heads = attention_.heads;
    biases_.resize(heads * width);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < width; ++i) {
        biases_[head * width + i] = attention_.bias[distance(i) * heads + head];
      }
    }
  }

  Reach reach(int64_t first, int64_t count) const {
    const KeyRanges& ranges = attention_.ranges;
    constexpr int32_t kLast = std::numeric_limits<int32_t>::max();
    Reach reach = {kLast, -1, kLast, -1};
    for (int64_t i = first; i < first + count; ++i) {
      if (ranges.first[i] <= ranges.last[i]) {
        reach.first = std::min(reach.first, ranges.first[i]);
        reach.last = std::max(reach.last, ranges.last[i]);
      }
      if (ranges.group == nullptr) continue;
      if (ranges.group[i] < ranges.first[i] || ranges.own[i] > ranges.last[i]) {
        reach.group = std::min(reach.group, ranges.group[i]);
        reach.own = std::max(reach.own, ranges.own[i]);
      }
    }
    return reach;
  }

  AttentionRow part(int64_t row, int64_t head) const {
    const Attention& of = attention_;
    AttentionRow part = {};
    part.first_query = queries_[row].first;
    part.num_queries = queries_[row].count;
    part.first_key = keys_[row].first;
    part.num_keys = keys_[row].count;
    part.dim = of.dim;
    part.value_dim = of.value_dim;
    part.query_stride = of.heads * of.dim;
    part.value_stride = of.heads * of.value_dim;
    part.query = of.query + head * of.dim;
    part.key = of.key + head * of.dim;
    part.value = of.value + head * of.value_dim;
    part.ranges = of.ranges;
    part.reaches = reaches_.data() + first_reach_[row];
    part.bias = of.bias == nullptr ? nullptr : biases_.data() + head * bias_width();
    part.bias_origin = longest_;
    part.alpha = of.alpha;
    return part;
  }

  const Attention& attention_;
  std::vector<Span> queries_, keys_, pieces_;
  std::vector<Reach> reaches_;
  std::vector<size_t> first_reach_;
  std::vector<float> biases_;
  int64_t longest_ = 0;
  bool is_small_ = true;
};

std::unique_ptr<float[]> make_scratch(const Attention& of) {
  return std::unique_ptr<float[]>(new float[attention_scratch(of.dim, of.value_dim)]);
}

void clear(float* array, int64_t elements, int64_t heads, int64_t dim) {
  std::memset(array, 0, elements * heads * dim * sizeof(float));
}

}  // namespace

void attend(Team& team, const Attention& of, float* out) {
  clear(out, of.num_queries, of.heads, of.value_dim);
  Plan(of).run(team, [&](AttentionRow row, int64_t, int64_t head) {
    row.out = out + head * of.value_dim;
    kernels().attend_row(row, make_scratch(of).get());
  });
}

void attend_gradients(Team& team, const Attention& of, const AttentionGradients& gradients) {
  clear(gradients.of_query, of.num_queries, of.heads, of.dim);
  clear(gradients.of_key, of.num_keys, of.heads, of.dim);
  clear(gradients.of_value, of.num_keys, of.heads, of.value_dim);
  const Plan plan(of);
  const bool has_bias = of.bias != nullptr;
  const int64_t width = has_bias ? plan.bias_width() : 0;
  std::vector<float> of_bias(plan.num_pieces() * of.heads * width);
  plan.run(team, [&](AttentionRow row, int64_t piece, int64_t head) {
    row.gradient = gradients.gradient + head * of.value_dim;
    row.of_query = gradients.of_query + head * of.dim;
    row.of_key = gradients.of_key + head * of.dim;
    row.of_value = gradients.of_value + head * of.value_dim;
    row.of_bias = has_bias ? of_bias.data() + (piece * of.heads + head) * width : nullptr;
    kernels().attend_row_gradients(row, make_scratch(of).get());
  });
  if (!has_bias) return;
  clear(gradients.of_bias, of.distances, of.heads, 1);
  for (int64_t i = 0; i < plan.num_pieces() * of.heads; ++i) {
    plan.sum_bias(of_bias.data() + i * width, i % of.heads, gradients.of_bias);
  }
}

}  // namespace jaxrec
