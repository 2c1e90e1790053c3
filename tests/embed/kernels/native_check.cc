// The native kernels without XLA: every primitive on random batches with bad ids and bad lengths,
// for each instruction set and for several numbers of threads. Results must be those of a plain
// loop, and the same bits for any number of threads. Built with sanitizers by tests/sanitize.sh.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "dot_products.h"
#include "drop_ids.h"
#include "kernels.h"
#include "lookup.h"
#include "max_gradients.h"
#include "new_rows.h"
#include "runs.h"
#include "shift.h"
#include "team.h"
#include "update_rows.h"

using namespace jaxrec;

namespace {

constexpr float kNone = std::numeric_limits<float>::infinity();

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s (%s)\n", what.c_str(), kernels().name);
  std::exit(1);
}

// Threads as XLA's pool gives them: started by the caller, some of them late.
class Threads {
 public:
  ~Threads() {
    for (std::thread& thread : threads_) thread.join();
  }
  Starter starter() {
    return [this](std::function<void()> work) {
      int number = static_cast<int>(threads_.size());
      threads_.emplace_back([work = std::move(work), number] {
        if (number % 3 == 2) std::this_thread::sleep_for(std::chrono::microseconds(300));
        work();
      });
    };
  }

 private:
  std::vector<std::thread> threads_;
};

template <class Work>
void with_team(int num_threads, const Work& work) {
  Threads threads;
  Team team(threads.starter(), num_threads);
  work(team);
}

// With the sanitizer of threads each access takes long, and so does the start of a team. It checks what
// matters to threads; what matters to addresses and to bits alone, another run of this file checks.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOnlyThreads = true;
#else
constexpr bool kOnlyThreads = false;
#endif

// Numbers of threads that one work has, ascending; of all of them the last has the most races.
std::vector<int> team_sizes(std::vector<int> sizes) {
  if (kOnlyThreads) sizes.erase(sizes.begin(), sizes.end() - 1);
  return sizes;
}

// Lengths of bags that no batch may have.
std::vector<int32_t> bad_lengths() {
  if (kOnlyThreads) return {1 << 30};
  return {-1, 1 << 30, std::numeric_limits<int32_t>::min()};
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

float read(const void* rows, Type type, int64_t i) {
  if (type == Type::kF32) return static_cast<const float*>(rows)[i];
  uint32_t bits = static_cast<const uint16_t*>(rows)[i];
  if (type == Type::kBF16) return from_bits(bits << 16);
  float magnitude = (bits & 0x7C00) == 0
                        ? static_cast<float>(bits & 0x3FF) * 0x1p-24f
                        : from_bits(((bits & 0x7FFF) << 13) + (112u << 23));
  return (bits & 0x8000) ? -magnitude : magnitude;
}

// A copy of rows in equal parts, each in memory that ends where it ends.
class Apart {
 public:
  Apart(const void* rows, int64_t num_rows, int64_t row_bytes, int64_t num_parts)
      : part_bytes_(num_rows / num_parts * row_bytes), part_rows_(num_rows / num_parts) {
    for (int64_t part = 0; part < num_parts; ++part) {
      const char* begin = static_cast<const char*>(rows) + part * part_bytes_;
      memory_.emplace_back(begin, begin + part_bytes_);
      places_.push_back(memory_.back().data());
    }
  }

  Rows rows() const { return {places_.data(), static_cast<int64_t>(places_.size()), part_rows_}; }

  void join(void* rows) const {
    for (const std::vector<char>& part : memory_) {
      std::memcpy(rows, part.data(), part.size());
      rows = static_cast<char*>(rows) + part.size();
    }
  }

 private:
  int64_t part_bytes_, part_rows_;
  std::vector<std::vector<char>> memory_;
  std::vector<void*> places_;
};

struct Case {
  int64_t dim;
  Type type;
  bool weighted;
  bool mean;
  int64_t num_features;
  int64_t num_bags;
  int64_t most;       // Ids of a bag.
  double hot;         // Share of the ids that are row 0.
};

// A batch in memory that ends where it ends, so that a read past the end is seen.
struct Data {
  Case shape;
  int64_t num_rows_each = 37;
  std::vector<char> table;
  std::vector<int32_t> ids, lengths;
  std::vector<float> weights, gradients;
  std::vector<Feature> features;

  explicit Data(const Case& shape) : shape(shape) {
    std::mt19937 random(7);
    const int64_t num_rows = num_rows_each * shape.num_features;
    table.resize(num_rows * shape.dim * size_of(shape.type));
    for (int64_t i = 0; i < num_rows * shape.dim; ++i) {
      const float x = static_cast<float>(static_cast<int>(random() % 200) - 100) / 64.0f;
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (shape.type == Type::kF32) reinterpret_cast<float*>(table.data())[i] = x;
      if (shape.type == Type::kBF16) {
        reinterpret_cast<uint16_t*>(table.data())[i] = static_cast<uint16_t>(bits >> 16);
      }
      if (shape.type == Type::kF16) {
        uint32_t size = bits & 0x7FFFFFFF;
        uint32_t half = size == 0 ? 0 : (size - (112u << 23)) >> 13;
        reinterpret_cast<uint16_t*>(table.data())[i] =
            static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
      }
    }
    for (int64_t f = 0; f < shape.num_features; ++f) {
      Feature feature = {static_cast<int64_t>(ids.size()), 0, static_cast<int64_t>(lengths.size()),
                         shape.num_bags, f * num_rows_each, num_rows_each, shape.mean,
                         static_cast<int64_t>(ids.size()), f, shape.num_features};
      int64_t used = 0;
      for (int64_t bag = 0; bag < shape.num_bags; ++bag) {
        lengths.push_back(static_cast<int32_t>(random() % (shape.most + 1)));
        used += lengths.back();
      }
      const int64_t padding = f % 2 == 0 ? 5 : 0;
      for (int64_t i = 0; i < used + padding; ++i) {
        bool is_hot = static_cast<double>(random() % 1000) < 1000 * shape.hot;
        ids.push_back(is_hot ? 0 : static_cast<int32_t>(random() % num_rows_each));
        weights.push_back(static_cast<float>(random() % 100) / 50.0f - 1.0f);
        if (random() % 50 == 0) ids.back() = static_cast<int32_t>(random());  // Mostly outside.
      }
      feature.capacity = used + padding;
      features.push_back(feature);
    }
    if (!shape.weighted) weights.clear();
    for (int64_t i = 0; i < shape.num_features * shape.num_bags * shape.dim; ++i) {
      gradients.push_back(static_cast<float>(random() % 100) / 50.0f - 1.0f);
    }
  }

  int64_t num_rows() const { return num_rows_each * shape.num_features; }
  int64_t num_bags() const { return shape.num_bags * shape.num_features; }
  Table rows(std::vector<char>& memory) const {
    return {memory.data(), shape.type, num_rows(), shape.dim};
  }
  Source source(const Rows& rows) const { return {&rows, 0, shape.type, num_rows(), shape.dim}; }
  Apart table_apart(int64_t num_parts) const {
    return Apart(table.data(), num_rows(), shape.dim * size_of(shape.type), num_parts);
  }
  Batch batch() const {
    return {ids.data(), lengths.data(), weights.empty() ? nullptr : weights.data(), features};
  }
};

std::string name_of(const Case& shape) {
  return "dim " + std::to_string(shape.dim) + " type " +
         std::to_string(static_cast<int>(shape.type));
}

bool is_close(double x, double expected, double tolerance) {
  return std::isnan(expected) ? std::isnan(x)
                              : std::abs(x - expected) <= tolerance * (1 + std::abs(expected));
}

void check_pooled(Data data, int64_t num_parts) {
  const Case& shape = data.shape;
  if (num_parts > 1) {
    // Bags feature by feature, so that those of a feature lie in one part.
    for (int64_t f = 0; f < shape.num_features; ++f) {
      data.features[f].out_row = f * shape.num_bags;
      data.features[f].out_step = 1;
    }
  }
  const Apart table = data.table_apart(num_parts);
  const Rows rows = table.rows();
  std::vector<double> expected(data.num_bags() * shape.dim, 0.0);
  for (const Feature& feature : data.features) {
    int64_t i = feature.id_start;
    for (int64_t bag = 0; bag < feature.stride; ++bag) {
      const int64_t length = data.lengths[feature.length_start + bag];
      double* out = expected.data() + (feature.out_row + bag * feature.out_step) * shape.dim;
      for (int64_t end = i + length; i < end; ++i) {
        const bool inside = data.ids[i] >= 0 && data.ids[i] < feature.row_count;
        double scale = shape.weighted ? data.weights[i] : 1.0;
        if (shape.mean) scale /= static_cast<double>(length);
        for (int64_t d = 0; d < shape.dim; ++d) {
          const int64_t row = feature.row_offset + data.ids[i];
          out[d] += inside ? scale * read(data.table.data(), shape.type, row * shape.dim + d) : NAN;
        }
      }
    }
  }
  std::vector<float> first;
  for (int threads : team_sizes({1, 2, 5})) {
    std::vector<float> out(expected.size());
    const Apart pooled(out.data(), data.num_bags(), shape.dim * 4, num_parts);
    with_team(threads, [&](Team& team) {
      pooled_lookup(team, data.source(rows), data.batch(), pooled.rows(), Type::kF32);
    });
    pooled.join(out.data());
    for (size_t i = 0; i < out.size(); ++i) {
      require(is_close(out[i], expected[i], 1e-5), "pooled lookup, " + name_of(shape));
    }
    if (first.empty()) first = out;
    require(std::memcmp(first.data(), out.data(), 4 * out.size()) == 0, "bits of pooled lookup");
  }
}

void check_rows(Data& data) {
  std::vector<int32_t> rows(data.ids.begin(), data.ids.end());
  rows.push_back(static_cast<int32_t>(data.num_rows()));
  const Case& shape = data.shape;
  while (rows.size() % 3 != 0) rows.push_back(0);
  const int64_t row_bytes = shape.dim * size_of(shape.type);
  std::vector<char> out(rows.size() * row_bytes);
  for (int64_t num_parts : {1, 3}) {
    const Apart table = data.table_apart(num_parts == 1 ? 1 : shape.num_features);
    const Apart found(out.data(), rows.size(), row_bytes, num_parts);
    const Rows source = table.rows();
    with_team(3, [&](Team& team) {
      row_lookup(team, data.source(source), rows.data(), rows.size(), found.rows());
    });
    std::vector<char> before = out;
    found.join(out.data());
    require(num_parts == 1 || before == out, "bits of rows in parts");
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool inside = rows[i] >= 0 && rows[i] < data.num_rows();
    for (int64_t d = 0; d < shape.dim && inside; ++d) {
      require(read(out.data(), shape.type, i * shape.dim + d) ==
                  read(data.table.data(), shape.type, rows[i] * shape.dim + d),
              "row lookup");
    }
  }
}

// Lengths that do not fit their ids must not lead past the end.
void check_bad_lengths(const Case& shape) {
  for (int32_t bad : bad_lengths()) {
    Data data(shape);
    for (size_t i = 0; i < data.lengths.size(); i += 2) data.lengths[i] = bad;
    std::vector<float> out(data.num_bags() * shape.dim);
    std::vector<int32_t> rows(data.ids.size()), bags(data.ids.size());
    std::vector<float> scales(data.ids.size());
    const Apart table = data.table_apart(1);
    const Apart pooled(out.data(), data.num_bags(), shape.dim * 4, 1);
    const Rows source = table.rows();
    with_team(2, [&](Team& team) {
      pooled_lookup(team, data.source(source), data.batch(), pooled.rows(), Type::kF32);
      flatten_bags(team, data.num_rows(), data.batch(), rows.data(), bags.data(), scales.data());
    });
    for (int32_t bag : bags) require(bag >= 0 && bag < data.num_bags(), "bag of a bad batch");
  }
}

void check_update(Data& data, Rule rule, bool stochastic) {
  const Case& shape = data.shape;
  const int64_t count = static_cast<int64_t>(data.ids.size());
  std::vector<int32_t> rows(count), bags(count);
  const bool has_scales = shape.weighted || shape.mean;
  std::vector<float> scales(has_scales ? count : 0);
  with_team(2, [&](Team& team) {
    flatten_bags(team, data.num_rows(), data.batch(), rows.data(), bags.data(),
                 has_scales ? scales.data() : nullptr);
  });
  bags[0] = -1;  // A lookup of no bag is passed over.

  std::vector<char> first_table;
  std::vector<float> first_state;
  for (int threads : team_sizes({1, 2, 5})) {
    std::vector<char> table = data.table;
    std::vector<float> state(data.num_rows() * shape.dim, 0.5f);
    std::vector<float> second(data.num_rows() * shape.dim, 0.25f), counts(data.num_rows(), 0.0f);
    Step step = {};
    step.rule = rule;
    step.rate = 0.125f;
    step.eps = 1e-8f;
    step.b1 = 0.9f;
    step.b2 = 0.999f;
    step.share1 = 0.1f;
    step.share2 = 0.001f;
    step.rest1 = 0.1f;
    step.rest2 = 0.001f;
    step.log_b1 = std::log(0.9f);
    step.log_b2 = std::log(0.999f);
    step.counts_rows = rule == Rule::kAdam;
    step.max_norm = rule == Rule::kAdagrad ? 1.5f : kNone;
    step.stochastic = stochastic;
    step.step = 3;
    step.first = state.data();
    step.second = second.data();
    step.counts = counts.data();
    const Apart gradients(data.gradients.data(), data.num_bags(), shape.dim * 4,
                          threads == 5 ? shape.num_features : 1);
    const Rows source = gradients.rows();
    with_team(threads, [&](Team& team) {
      fused_update(team, data.rows(table), step, rows.data(), count,
                   {&source, Type::kF32, shape.dim, bags.data(), data.num_bags(),
                    has_scales ? scales.data() : nullptr, rule == Rule::kSgd ? 0.75f : kNone});
    });
    if (first_table.empty()) {
      first_table = table;
      first_state = state;
    }
    require(first_table == table && first_state == state,
            "bits of an update, " + name_of(shape) + " rule " +
                std::to_string(static_cast<int>(rule)));
  }
  if (rule != Rule::kSgd) return;
  std::vector<double> expected(data.num_rows() * shape.dim);
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] = read(data.table.data(), shape.type, i);
  }
  for (int64_t i = 1; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= data.num_rows()) continue;
    for (int64_t d = 0; d < shape.dim; ++d) {
      double g = data.gradients[bags[i] * shape.dim + d];
      g = std::min(std::max(g, -0.75), 0.75) * (has_scales ? scales[i] : 1.0);
      expected[rows[i] * shape.dim + d] -= 0.125 * g;
    }
  }
  // Thousands of terms are added in float32.
  const double tolerance = shape.type == Type::kF32 ? 1e-4 : shape.type == Type::kF16 ? 2e-3 : 1e-2;
  for (size_t i = 0; i < expected.size(); ++i) {
    require(is_close(read(first_table.data(), shape.type, i), expected[i], tolerance),
            "update, " + name_of(shape));
  }
}

// Runs that end with a stretch, begin with one, cross an edge and cover a whole stretch. Gradients are
// small integers, so that sums are exact.
void check_stretches() {
  const int64_t edge = kMostInStretch, count = 17 * edge;
  std::vector<int64_t> sorted;  // The run of each lookup.
  int64_t num_runs = 0;
  auto add_run = [&](int64_t length) { sorted.insert(sorted.end(), length, num_runs++); };
  auto add_until = [&](int64_t end) {
    while (static_cast<int64_t>(sorted.size()) < end) add_run(1);
  };
  add_until(edge - 1);
  add_run(2);
  add_until(2 * edge - 3);
  add_run(3);
  add_run(2);
  add_until(4 * edge - 1);
  add_run(edge + 2);
  add_until(count);

  const int64_t num_rows = 2 * num_runs;  // The others occur in no lookup.
  std::vector<int32_t> rows(count);
  std::vector<float> gradients(count), expected(num_rows, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = 2 * sorted[i * 7919 % count];
    rows[i] = static_cast<int32_t>(row);
    gradients[i] = static_cast<float>(i % 5 + 1);
    expected[row] += gradients[i];
  }
  void* gradient_rows = gradients.data();
  const Rows source = {&gradient_rows, 1, count};
  Step step = {};
  step.rule = Rule::kSgd;
  step.rate = -1.0f;
  step.max_norm = kNone;
  for (int threads : team_sizes({1, 2, 5})) {
    std::vector<float> table(num_rows, 0.0f), sums(num_rows, 7.0f);
    void* sum_places = sums.data();
    with_team(threads, [&](Team& team) {
      const Gradients each = {&source, Type::kF32, 1, nullptr, count, nullptr, kNone};
      fused_update(team, {table.data(), Type::kF32, num_rows, 1}, step, rows.data(), count, each);
      sum_rows(team, {&sum_places, 1, num_rows}, num_rows, rows.data(), count, each);
    });
    require(table == expected && sums == expected, "runs at the edges of stretches");
  }
}

// A table of random bytes behind small scales and offsets, in memory that ends where it ends.
std::vector<uint8_t> packed_table(Code code, int64_t num_rows, int64_t row_bytes) {
  std::mt19937 random(11);
  std::vector<uint8_t> packed(num_rows * row_bytes);
  for (uint8_t& byte : packed) byte = static_cast<uint8_t>(random());
  for (int64_t row = 0; row < num_rows && code != Code::kFloat8; ++row) {
    const uint16_t scale = static_cast<uint16_t>(0x2000 + random() % 0x800);
    const uint16_t offset = static_cast<uint16_t>((random() % 2) << 15 | 0x3800 | random() % 0x400);
    std::memcpy(packed.data() + row * row_bytes, &scale, 2);
    std::memcpy(packed.data() + row * row_bytes + 2, &offset, 2);
  }
  return packed;
}

float packed_element(const uint8_t* row, Code code, int64_t column) {
  if (code == Code::kFloat8) {
    const uint8_t byte = row[column];
    const int exponent = byte >> 3 & 15;
    const float fraction = static_cast<float>(byte & 7) / 8;
    const float size = exponent == 0 ? std::ldexp(fraction, -6)
                                     : std::ldexp(1 + fraction, exponent - 7);
    return byte & 128 ? -size : size;
  }
  const int bits = code == Code::kInt8 ? 8 : code == Code::kInt4 ? 4 : 2;
  const int value = row[4 + column * bits / 8] >> (column * bits % 8) & ((1 << bits) - 1);
  uint16_t header[2];  // Rows of odd lengths are not aligned.
  std::memcpy(header, row, 4);
  return static_cast<float>(value) * read(header, Type::kF16, 0) + read(header, Type::kF16, 1);
}

void check_packed(const Data& data, Code code) {
  const Case& shape = data.shape;
  const int64_t dim = shape.dim;
  const int64_t per_byte = code == Code::kInt4 ? 2 : code == Code::kInt2 ? 4 : 1;
  const int64_t row_bytes = (code == Code::kFloat8 ? 0 : 4) + (dim + per_byte - 1) / per_byte;
  const std::vector<uint8_t> packed = packed_table(code, data.num_rows(), row_bytes);
  const PackedTable table = {packed.data(), code, data.num_rows(), row_bytes, dim};
  const std::string name = "packed lookup, " + name_of(shape) + " code " +
                           std::to_string(static_cast<int>(code));

  std::vector<double> expected(data.num_bags() * dim, 0.0), sizes(expected.size(), 0.0);
  for (const Feature& feature : data.features) {
    int64_t i = feature.id_start;
    for (int64_t bag = 0; bag < feature.stride; ++bag) {
      const int64_t length = data.lengths[feature.length_start + bag];
      const int64_t place = (feature.out_row + bag * feature.out_step) * dim;
      for (int64_t end = i + length; i < end; ++i) {
        const bool inside = data.ids[i] >= 0 && data.ids[i] < feature.row_count;
        double scale = shape.weighted ? data.weights[i] : 1.0;
        if (shape.mean) scale /= static_cast<double>(length);
        const uint8_t* row =
            packed.data() + (inside ? feature.row_offset + data.ids[i] : 0) * row_bytes;
        for (int64_t d = 0; d < dim; ++d) {
          const double term = inside ? scale * packed_element(row, code, d) : NAN;
          expected[place + d] += term;
          sizes[place + d] += std::abs(term);
        }
      }
    }
  }
  std::vector<float> first;
  for (int threads : team_sizes({1, 2, 5})) {
    std::vector<float> out(expected.size());
    with_team(threads, [&](Team& team) {
      packed_pooled_lookup(team, table, data.batch(), out.data(), Type::kF32);
    });
    for (size_t i = 0; i < out.size(); ++i) {
      const double tolerance = 1e-5 * (1 + sizes[i]);
      require(std::isnan(expected[i]) ? std::isnan(out[i])
                                      : std::abs(out[i] - expected[i]) <= tolerance,
              name);
    }
    if (first.empty()) first = out;
    require(std::memcmp(first.data(), out.data(), 4 * out.size()) == 0, "bits of " + name);
  }

  std::vector<int32_t> rows(data.ids.begin(), data.ids.end());
  rows.push_back(static_cast<int32_t>(data.num_rows()));
  std::vector<float> out(rows.size() * dim, 1.0f);
  with_team(3, [&](Team& team) {
    packed_row_lookup(team, table, rows.data(), static_cast<int64_t>(rows.size()), out.data(),
                      Type::kF32);
  });
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool inside = rows[i] >= 0 && rows[i] < data.num_rows();
    for (int64_t d = 0; d < dim; ++d) {
      const float found = out[i * dim + d];
      if (inside) {
        require(is_close(found, packed_element(packed.data() + rows[i] * row_bytes, code, d), 1e-6),
                "row of " + name);
      } else {
        require(rows[i] == data.num_rows() ? found == 0 : std::isnan(found), "no row of " + name);
      }
    }
  }
}

// Lengths that do not fit their ids must not lead a packed lookup past the end.
void check_bad_packed_lengths(const Case& shape) {
  for (int32_t bad : bad_lengths()) {
    Data data(shape);
    for (size_t i = 0; i < data.lengths.size(); i += 2) data.lengths[i] = bad;
    const int64_t row_bytes = 4 + shape.dim;
    const std::vector<uint8_t> packed = packed_table(Code::kInt8, data.num_rows(), row_bytes);
    std::vector<float> out(data.num_bags() * shape.dim);
    with_team(2, [&](Team& team) {
      packed_pooled_lookup(team, {packed.data(), Code::kInt8, data.num_rows(), row_bytes, shape.dim},
                           data.batch(), out.data(), Type::kF32);
    });
  }
}

void check_runs() {
  std::mt19937 random(3);
  std::vector<int32_t> rows(20000);
  for (int32_t& row : rows) row = random() % 3 == 0 ? 5 : static_cast<int32_t>(random() % 3000) - 9;
  const int32_t count = static_cast<int32_t>(rows.size()), num_rows = 2900;
  for (int threads : team_sizes({1, 4})) {
    std::vector<int32_t> order(count), segments(count), unique(count), inverse(count), counts(7);
    std::vector<int32_t> grouped(count);
    with_team(threads, [&](Team& team) {
      build_runs(team, rows.data(), count, num_rows, order.data(), segments.data(), unique.data(),
                 inverse.data());
      bucket(team, rows.data(), count, 7, grouped.data(), counts.data());
    });
    auto key = [&](int32_t i) {
      return rows[i] < 0 || rows[i] >= num_rows ? num_rows : rows[i];
    };
    for (int32_t i = 0; i < count; ++i) {
      require(key(order[i]) == unique[segments[i]] && inverse[order[i]] == segments[i], "runs");
      if (i == 0) continue;
      require(key(order[i - 1]) < key(order[i]) ||
                  (key(order[i - 1]) == key(order[i]) && order[i - 1] < order[i]),
              "order of runs");
    }
  }
}

void check_sum_rows(const Data& data) {
  const int64_t dim = data.shape.dim, num_rows = data.num_rows_each;
  const int64_t count = static_cast<int64_t>(data.ids.size());
  std::vector<int32_t> bags(count);
  for (int64_t i = 0; i < count; ++i) bags[i] = static_cast<int32_t>(i % data.num_bags());
  std::vector<double> expected(num_rows * dim, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    if (data.ids[i] < 0 || data.ids[i] >= num_rows) continue;
    for (int64_t d = 0; d < dim; ++d) {
      expected[data.ids[i] * dim + d] += data.gradients[bags[i] * dim + d];
    }
  }
  const Apart gradients(data.gradients.data(), data.num_bags(), dim * 4, 1);
  const Rows source = gradients.rows();
  for (int64_t num_parts : {int64_t{1}, num_rows}) {
    std::vector<float> sums(num_rows * dim, NAN);
    const Apart found(sums.data(), num_rows, dim * 4, num_parts);
    with_team(3, [&](Team& team) {
      sum_rows(team, found.rows(), num_rows, data.ids.data(), count,
               {&source, Type::kF32, dim, bags.data(), data.num_bags(), nullptr, kNone});
    });
    found.join(sums.data());
    for (size_t i = 0; i < sums.size(); ++i) {
      require(is_close(sums[i], expected[i], 1e-4), "sums of rows, " + name_of(data.shape));
    }
  }
}

void check_shift_rows() {
  const std::vector<int64_t> starts = {0, 5, 6, 40}, shifts = {10, -5, 1000, 0};
  std::vector<int32_t> rows(20000), out(rows.size());
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % 70) - 10;
  with_team(3, [&](Team& team) {
    shift_rows(team, rows.data(), static_cast<int64_t>(rows.size()), starts.data(), shifts.data(),
               4, 50, -1, out.data());
  });
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t row = rows[i];
    const int32_t shift = row < 5 ? 10 : row < 6 ? -5 : row < 40 ? 1000 : 0;
    require(out[i] == (row < 0 || row >= 50 ? -1 : row + shift), "shifted rows");
  }
}

void check_pairs(int64_t samples, int64_t n, int64_t dim) {
  const int64_t pairs = n * (n - 1) / 2;
  std::mt19937 generator(5);
  std::normal_distribution<float> normal;
  std::vector<float> vectors(samples * n * dim), gradient(samples * pairs);
  for (float& x : vectors) x = normal(generator);
  for (float& x : gradient) x = normal(generator);
  std::vector<double> products(gradient.size(), 0.0), gradients(vectors.size(), 0.0);
  for (int64_t s = 0; s < samples; ++s) {
    int64_t pair = s * pairs;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i + 1; j < n; ++j, ++pair) {
        const int64_t a = (s * n + i) * dim, b = (s * n + j) * dim;
        for (int64_t d = 0; d < dim; ++d) {
          products[pair] += static_cast<double>(vectors[a + d]) * vectors[b + d];
          gradients[a + d] += static_cast<double>(gradient[pair]) * vectors[b + d];
          gradients[b + d] += static_cast<double>(gradient[pair]) * vectors[a + d];
        }
      }
    }
  }
  std::vector<float> first_products, first_gradients;
  const std::vector<int> sizes = team_sizes({1, 3});
  for (int threads : sizes) {
    std::vector<float> found(products.size(), NAN), summed(gradients.size(), NAN);
    const Vectors of = {vectors.data(), samples, n, dim};
    with_team(threads, [&](Team& team) {
      pair_products(team, of, found.data());
      pair_gradients(team, of, gradient.data(), summed.data());
    });
    const std::string what = std::to_string(n) + " vectors of " + std::to_string(dim);
    for (size_t i = 0; i < found.size(); ++i) {
      require(is_close(found[i], products[i], 1e-4), "products of " + what);
    }
    for (size_t i = 0; i < summed.size(); ++i) {
      require(is_close(summed[i], gradients[i], 1e-4), "gradients of " + what);
    }
    if (threads == sizes.front()) {
      first_products = found;
      first_gradients = summed;
    }
    require(found == first_products && summed == first_gradients, "the bits of " + what);
  }
}

// Rows with ranges of keys at random, some of them outside of the row.
struct AttentionData {
  AttentionData(std::vector<int32_t> lengths, int64_t heads, int64_t dim, int64_t value_dim,
                int64_t distances, bool has_groups)
      : heads(heads), dim(dim), value_dim(value_dim), distances(distances) {
    offsets = {0};
    for (int32_t length : lengths) offsets.push_back(offsets.back() + length);
    n = offsets.back() + 2;  // With padding.
    for (auto* array : {&query, &key}) fill(*array, n * heads * dim);
    for (auto* array : {&value, &gradient}) fill(*array, n * heads * value_dim);
    fill(bias, distances * heads);
    first.assign(n, std::numeric_limits<int32_t>::max());
    last.assign(n, -1);
    own.assign(n, -1);
    group = first;
    for (size_t row = 0; row < lengths.size(); ++row) {
      const int32_t begin = offsets[row], end = offsets[row + 1];
      for (int32_t i = begin; i < end; ++i) {
        std::uniform_int_distribution<int32_t> place(begin - 3, end + 2);
        first[i] = place(generator);
        last[i] = place(generator);
        own[i] = i;
        group[i] = i - static_cast<int32_t>(generator() % 3);
      }
    }
    if (!has_groups) group.clear();
  }

  void fill(std::vector<float>& array, int64_t size) {
    std::normal_distribution<float> normal;
    array.resize(size);
    for (float& x : array) x = normal(generator);
  }

  Attention attention(const std::vector<int32_t>& cut) const {
    const int32_t* groups = group.empty() ? nullptr : group.data();
    return {query.data(), key.data(), value.data(), n, n, heads, dim, value_dim,
            {first.data(), last.data(), own.data(), groups}, cut.data(), cut.data(),
            static_cast<int64_t>(cut.size()) - 1, distances ? bias.data() : nullptr, distances,
            0.5f};
  }

  std::mt19937 generator{3};
  int64_t n, heads, dim, value_dim, distances;
  std::vector<int32_t> offsets, first, last, own, group;
  std::vector<float> query, key, value, gradient, bias;
};

struct AttentionResults {
  explicit AttentionResults(const AttentionData& of)
      : out(of.value.size(), NAN), query(of.query.size(), NAN), key(of.key.size(), NAN),
        value(of.value.size(), NAN), bias(of.bias.size(), NAN) {}

  AttentionGradients gradients(const AttentionData& of) {
    return {of.gradient.data(), query.data(), key.data(), value.data(), bias.data()};
  }
  bool operator==(const AttentionResults& other) const {
    return out == other.out && query == other.query && key == other.key &&
           value == other.value && bias == other.bias;
  }

  std::vector<float> out, query, key, value, bias;
};

void check_attention(const AttentionData& of) {
  std::vector<double> out(of.value.size()), query(of.query.size()), key(of.key.size()),
      value(of.value.size()), bias(of.bias.size());
  const int64_t dim = of.dim, value_dim = of.value_dim, heads = of.heads;
  for (size_t row = 0; row + 1 < of.offsets.size(); ++row) {
    for (int64_t i = of.offsets[row]; i < of.offsets[row + 1]; ++i) {
      for (int64_t j = of.offsets[row]; j < of.offsets[row + 1]; ++j) {
        const bool is_grouped = !of.group.empty() && of.group[i] <= j && j <= of.own[i];
        if (!(of.first[i] <= j && j <= of.last[i]) && !is_grouped) continue;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t a = (i * heads + h) * dim, b = (j * heads + h) * dim;
          const int64_t c = (i * heads + h) * value_dim, e = (j * heads + h) * value_dim;
          const int64_t distance = std::min(std::max<int64_t>(i - j, 0), of.distances - 1);
          double score = of.distances ? of.bias[distance * heads + h] : 0.0, given = 0;
          for (int64_t d = 0; d < dim; ++d) score += 0.5 * of.query[a + d] * of.key[b + d];
          const double gate = 1 / (1 + std::exp(-score)), weight = score * gate;
          for (int64_t d = 0; d < value_dim; ++d) {
            out[c + d] += weight * of.value[e + d];
            value[e + d] += weight * of.gradient[c + d];
            given += static_cast<double>(of.gradient[c + d]) * of.value[e + d];
          }
          const double slope = given * gate * (1 + score * (1 - gate));
          if (of.distances) bias[distance * heads + h] += slope;
          for (int64_t d = 0; d < dim; ++d) {
            query[a + d] += 0.5 * slope * of.key[b + d];
            key[b + d] += 0.5 * slope * of.query[a + d];
          }
        }
      }
    }
  }
  std::unique_ptr<AttentionResults> before;
  for (int threads : team_sizes({1, 3})) {
    AttentionResults found(of);
    with_team(threads, [&](Team& team) {
      attend(team, of.attention(of.offsets), found.out.data());
      attend_gradients(team, of.attention(of.offsets), found.gradients(of));
    });
    const auto compare = [&](const std::vector<float>& got, const std::vector<double>& exact,
                             const char* what) {
      for (size_t i = 0; i < got.size(); ++i) require(is_close(got[i], exact[i], 1e-3), what);
    };
    compare(found.out, out, "attention");
    compare(found.query, query, "the gradient of queries");
    compare(found.key, key, "the gradient of keys");
    compare(found.value, value, "the gradient of values");
    compare(found.bias, bias, "the gradient of the bias");
    if (before != nullptr) require(found == *before, "the bits of attention");
    before = std::make_unique<AttentionResults>(found);
  }
  // Offsets and places that the arrays do not have.
  AttentionData wrong = of;
  for (int32_t& place : wrong.own) place *= 1000;
  for (std::vector<int32_t> cut : {std::vector<int32_t>{0, 1 << 30, 5}, {0, -7, 1 << 30}, {3}}) {
    AttentionResults found(of);
    with_team(2, [&](Team& team) {
      attend(team, wrong.attention(cut), found.out.data());
      attend_gradients(team, wrong.attention(cut), found.gradients(of));
    });
  }
}

void check_new_rows() {
  // Smaller and larger than a piece, a pattern and a huge page.
  for (int64_t row_bytes : {int64_t{4}, int64_t{12}, int64_t{40000}}) {
    for (int64_t num_rows : {int64_t{0}, int64_t{1}, int64_t{101}, 5'000'000 / row_bytes}) {
      std::vector<char> row(row_bytes), out(row_bytes * num_rows);
      for (char& byte : row) byte = static_cast<char>(random());
      with_team(3, [&](Team& team) {
        new_rows(team, row.data(), row_bytes, num_rows, out.data());
      });
      for (int64_t i = 0; i < num_rows; ++i) {
        require(std::memcmp(out.data() + i * row_bytes, row.data(), row_bytes) == 0, "new rows");
      }
    }
  }
}

#include "maxima_check.h"

}  // namespace

int main() {
  std::vector<Case> cases = {
      {1, Type::kF32, false, false, 2, 30, 4, 0.0},
      {3, Type::kBF16, true, false, 3, 30, 4, 0.0},
      {16, Type::kF32, false, true, 2, 300, 9, 0.5},
      {64, Type::kF32, false, false, 2, 400, 30, 0.6},
      {64, Type::kBF16, true, true, 1, 50, 5, 0.0},
      {100, Type::kF16, false, false, 2, 40, 5, 0.1},
      {128, Type::kF16, true, false, 1, 40, 5, 0.1},
      // Panels of every number of vectors, and a rest, with each instruction set.
      {255, Type::kF32, true, true, 2, 30, 5, 0.3},
      {255, Type::kBF16, false, false, 1, 30, 5, 0.3},
      {256, Type::kF32, false, true, 1, 30, 5, 0.0},
      {257, Type::kF32, true, true, 1, 20, 5, 0.0},
      {4096, Type::kF32, false, false, 1, 3, 3, 0.0},
  };
  // Each number of columns behind a row's last whole vector; they matter to addresses.
  constexpr int64_t kStep = kOnlyThreads ? 9 : 1;
  for (int64_t dim = 2; dim <= 34; dim += kStep) {
    for (Type type : {Type::kF32, Type::kBF16, Type::kF16}) {
      cases.push_back({dim, type, dim % 2 == 1, false, 1, 8, 3, 0.2});
    }
  }
  int checked = 0;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    if (!select_kernels(name)) continue;
    ++checked;
    for (const Case& shape : cases) {
      Data data(shape);
      for (int64_t num_parts : {int64_t{1}, shape.num_features}) check_pooled(data, num_parts);
      check_rows(data);
      check_bad_lengths(shape);
      for (Code code : {Code::kInt8, Code::kInt4, Code::kInt2, Code::kFloat8}) {
        check_packed(data, code);
      }
      check_bad_packed_lengths(shape);
      check_max(data);
      check_max_of_bad_lengths(shape);
      check_sum_rows(data);
      for (Rule rule : {Rule::kSgd, Rule::kAdagrad, Rule::kRowwiseAdagrad, Rule::kAdam,
                        Rule::kPartialRowwiseAdam}) {
        check_update(data, rule, false);
        check_update(data, rule, true);
      }
    }
    check_stretches();
    check_runs();
    check_shift_rows();
    check_new_rows();
    check_max_gradients(0, 0, 4);
    check_max_gradients(0, 5, 3);
    check_max_gradients(4, 0, 3);
    check_max_gradients(6, 18, 0);
    check_max_gradients(2000, 5990, 33);  // In several pieces.
    for (bool odd : {false, true}) {
      check_drop_ids(0, 0, 0, 1, odd);
      check_drop_ids(3, 0, 5, 1, odd);
      check_drop_ids(3, 5, 0, 3, odd);
      check_drop_ids(4, 30, 40, 3, odd);
      check_drop_ids(5, 900, 2000, 3, odd);  // By several threads.
    }
    for (int64_t n : {0, 1, 2, 3, 4, 5, 6, 9, 17, 18, 27, 33, 34, 50, 66, 81}) {
      for (int64_t dim : {0, 1, 3, 4, 16, 21, 65}) check_pairs(3, n, dim);
    }
    check_pairs(2000, 9, 10);  // In several pieces.
    check_attention({{5, 0, 1, 70}, 2, 8, 5, 0, true});
    check_attention({{64, 130, 3}, 1, 33, 16, 20, false});
    check_attention({{200}, 3, 4, 32, 300, true});
    check_attention({std::vector<int32_t>(90, 30), 2, 21, 3, 4, true});  // In several pieces.
    check_attention({{}, 2, 4, 4, 3, true});
  }
  std::printf("native kernels: %d instruction sets agree\n", checked);
}
