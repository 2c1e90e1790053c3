#include "jaxrec/serving/encoder.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "dense_encoder.h"
#include "hash.h"
#include "jaxrec/serving/error.h"
#include "json_columns.h"
#include "npy.h"
#include "npy_vector.h"
#include "raw_values.h"
#include "vocabulary.h"

namespace jaxrec::serving {
namespace {

namespace fs = std::filesystem;

class CategoricalEncoder {
 public:
  CategoricalEncoder(const CategoricalColumn& column, std::optional<Vocabulary> vocabulary,
                     NpyVector<int64_t> frozen_ids)
      : column_(column),
        vocabulary_(std::move(vocabulary)),
        frozen_ids_(std::move(frozen_ids)) {}

  const std::string& name() const { return column_.name; }

  // Column of the request.
  std::string input() const { return column_.part ? time_of(name()) : name(); }

  // Returns the rows of all samples.
  Column encode(const Json& samples) const {
    Column out;
    Kind kind = Kind::kUnknown;
    int64_t sample = 0;
    for (const Json& value : list_of_samples(samples, "column " + in_quotes(input()))) {
      if (column_.part) {
        const std::optional<int64_t> time = read_time(value, input(), sample);
        encode_one(time ? Json(part_of(*time, *column_.part)) : Json(), sample, kind, out);
      } else if (!column_.is_list) {
        encode_one(value, sample, kind, out);
      } else if (value.is_array()) {
        for (const Json& each : value) out.ids.push_back(row(each, sample, kind));
      } else if (!value.is_null()) {
        throw RequestError(in_column(name(), sample) + "expected a list or null, got " +
                           excerpt(value));
      }
      out.offsets.push_back(static_cast<int64_t>(out.ids.size()));
      ++sample;
    }
    return out;
  }

 private:
  using Encoding = CategoricalColumn::Encoding;
  // Type of the values of a hashed column, that of the first one.
  enum class Kind { kUnknown, kText, kInteger };

  void encode_one(const Json& value, int64_t sample, Kind& kind, Column& out) const {
    if (!value.is_null()) return out.ids.push_back(row(value, sample, kind));
    if (column_.refuses_null) {
      throw RequestError(in_row(name(), sample) +
                         "the value is null; fill it, or give missing: unknown in the schema");
    }
    if (!vocabulary_) return;  // an empty bag
    out.ids.push_back(0);
  }

  int64_t row(const Json& value, int64_t sample, Kind& kind) const {
    switch (column_.encoding) {
      case Encoding::kVocabulary: return vocabulary_row(value, sample);
      case Encoding::kHash: return hash_row(value, sample, kind);
      case Encoding::kFrozen: return frozen_row(value, sample, kind);
      case Encoding::kModulo: {
        const int64_t id = integer(value, sample) % column_.num_embeddings;
        return id < 0 ? id + column_.num_embeddings : id;
      }
      default: return checked_id(integer(value, sample), sample);
    }
  }

  int64_t vocabulary_row(const Json& value, int64_t sample) const {
    const int64_t row = vocabulary_->is_integer() ? vocabulary_->row(integer(value, sample))
                                                  : vocabulary_->row(text(value, sample));
    if (row < 0) {
      throw RequestError(in_row(name(), sample) + excerpt(value) +
                         " is not in the vocabulary, which has no rows for unknown values; make it "
                         "with num_unknown=1 or more");
    }
    return row;
  }

  // The row of a raw id: an integer itself, or the hash of a text.
  int64_t frozen_row(const Json& value, int64_t sample, Kind& kind) const {
    constexpr int64_t kReserved = -1;
    int64_t id;
    if (column_.is_boolean) {
      id = integer(value, sample);
    } else if (check_kind(value, sample, kind); value.is_string()) {
      id = static_cast<int64_t>(hash_of(value.get_ref<const std::string&>(), 0));
      if (id == kReserved) --id;
    } else {
      id = value.is_number_unsigned() ? static_cast<int64_t>(value.get<uint64_t>())
                                      : value.get<int64_t>();
      if (id == kReserved) {
        throw RequestError(in_row(name(), sample) +
                           "id -1 (2**64 - 1 unsigned) is reserved, since many pipelines pad with "
                           "it; make it null, or give such ids another number");
      }
    }
    size_t first = 0, last = frozen_ids_.size();
    while (first < last) {
      const size_t middle = first + (last - first) / 2;
      if (frozen_ids_[middle] < id) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    const bool is_known = first < frozen_ids_.size() && frozen_ids_[first] == id;
    return is_known ? static_cast<int64_t>(first) + 1 : 0;
  }

  void check_kind(const Json& value, int64_t sample, Kind& kind) const {
    if (column_.is_text.value_or(value.is_string())) {
      text(value, sample);
    } else if (!is_whole(value)) {
      const char* wanted = column_.is_text ? "an integer" : "text or an integer";
      throw RequestError(in_column(name(), sample) + "expected " + wanted + or_null() + ", got " +
                         excerpt(value));
    }
    const Kind of_value = value.is_string() ? Kind::kText : Kind::kInteger;
    if (kind == Kind::kUnknown) kind = of_value;
    if (kind != of_value) {
      throw RequestError(in_column(name(), sample) + excerpt(value) +
                         " is of another type than the values before it; give either text or "
                         "integers");
    }
  }

  int64_t hash_row(const Json& value, int64_t sample, Kind& kind) const {
    uint64_t hash;
    if (column_.is_boolean) {
      hash = hash_of(static_cast<uint64_t>(integer(value, sample)), 0);
    } else if (check_kind(value, sample, kind); value.is_string()) {
      hash = hash_of(value.get_ref<const std::string&>(), 0);
    } else if (value.is_number_unsigned()) {
      hash = hash_of(value.get<uint64_t>(), 0);
    } else {
      hash = hash_of(static_cast<uint64_t>(value.get<int64_t>()), 0);
    }
    return static_cast<int64_t>(hash % static_cast<uint64_t>(column_.num_embeddings));
  }

  int64_t checked_id(int64_t id, int64_t sample) const {
    if (id >= 0 && id < column_.num_embeddings) return id;
    throw RequestError(in_row(name(), sample) + "id " + std::to_string(id) +
                       " is outside of its table of " + std::to_string(column_.num_embeddings) +
                       " rows; give a larger num_embeddings, or another encoding");
  }

  int64_t integer(const Json& value, int64_t sample) const {
    if (column_.is_boolean) {
      if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
      throw RequestError(in_column(name(), sample) + "expected true or false" + or_null() +
                         ", got " + excerpt(value));
    }
    if (!is_whole(value)) {
      throw RequestError(in_column(name(), sample) + "expected an integer" + or_null() + ", got " +
                         excerpt(value));
    }
    constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (value.is_number_unsigned() && value.get<uint64_t>() > kMost) {
      throw RequestError(in_column(name(), sample) + excerpt(value) + " does not fit 64 bits");
    }
    return value.get<int64_t>();
  }

  const std::string& text(const Json& value, int64_t sample) const {
    if (!value.is_string()) {
      throw RequestError(in_column(name(), sample) + "expected text" + or_null() + ", got " +
                         excerpt(value));
    }
    return value.get_ref<const std::string&>();
  }

  // A sample without a list may be null.
  const char* or_null() const { return column_.is_list ? "" : " or null"; }

  const CategoricalColumn column_;
  const std::optional<Vocabulary> vocabulary_;
  const NpyVector<int64_t> frozen_ids_;
};

// The files of an encoding, mapped into memory.
class Files {
 public:
  explicit Files(const fs::path& directory) : directory_(directory) {}

  std::string_view map(const std::string& file) {
    return files_.emplace_back(directory_ / file).bytes();
  }

  // Calls a function whose std::invalid_argument is about a file.
  template <class Function>
  auto reading(const std::string& file, Function f) -> decltype(f()) {
    try {
      return f();
    } catch (const std::invalid_argument& error) {
      throw ArtifactError((directory_ / file).string() + " cannot be used: " + error.what());
    }
  }

 private:
  const fs::path directory_;
  std::deque<MappedFile> files_;
};

std::vector<Moments> read_moments(const std::string& file, Files& files, size_t columns) {
  const std::string_view content = files.map(file);
  return files.reading(file, [&] {
    const NpyHeader header = read_npy_header(content);
    const std::vector<int64_t> shape = {static_cast<int64_t>(columns), 2};
    if (header.type != "<f8" || header.shape != shape) {
      throw std::invalid_argument("it does not hold the moments of " + std::to_string(columns) +
                                  " columns");
    }
    std::vector<Moments> moments(columns);
    if (columns > 0) {
      std::memcpy(moments.data(), content.data() + header.data_start, columns * sizeof(Moments));
    }
    return moments;
  });
}

Vocabulary read_vocabulary(const VocabularyFiles& description, Files& files) {
  const Vocabulary::Files contents = {
      files.map(description.hashes), files.map(description.places), files.map(description.values),
      description.offsets ? files.map(*description.offsets) : std::string_view()};
  return files.reading(description.hashes, [&] { return Vocabulary(description, contents); });
}

NpyVector<int64_t> read_frozen_ids(const std::string& file, Files& files) {
  const std::string_view content = files.map(file);
  return files.reading(file, [&] { return NpyVector<int64_t>(content, "<i8"); });
}

}  // namespace

struct Encoder::State {
  Manifest manifest;
  Files files;
  std::vector<DenseEncoder> dense;
  std::vector<CategoricalEncoder> categorical;  // in the order of the model's features

  State(const fs::path& directory, const Manifest& of_model)
      : manifest(of_model), files(directory) {
    if (!manifest.encoding) {
      throw ArtifactError(directory.string() + (manifest.no_encoding
                                                    ? ": " + *manifest.no_encoding
                                                    : " was exported without an encoder of columns"));
    }
    const ColumnEncoding& encoding = *manifest.encoding;
    const std::vector<Moments> moments =
        read_moments(encoding.moments, files, encoding.dense.size());
    for (size_t i = 0; i < moments.size(); ++i) dense.emplace_back(encoding.dense[i], moments[i]);
    const RaggedSpec* ragged = nullptr;
    for (const InputSpec& input : manifest.batch.inputs) {
      if (const auto* array = std::get_if<ArraySpec>(&input)) {
        const std::vector<int64_t> shape = {static_cast<int64_t>(num_dense())};
        if (array->dtype != DType::kFloat32 || array->shape != shape) refuse(directory);
      } else if (ragged == nullptr && !std::get<RaggedSpec>(input).is_weighted) {
        ragged = &std::get<RaggedSpec>(input);
      } else {
        refuse(directory);
      }
    }
    if (ragged == nullptr) refuse(directory);
    for (const Feature& feature : ragged->features) {
      const auto found = std::find_if(encoding.categorical.begin(), encoding.categorical.end(),
                                      [&](const auto& each) { return each.name == feature.name; });
      if (found == encoding.categorical.end()) refuse(directory);
      std::optional<Vocabulary> vocabulary;
      if (found->vocabulary) vocabulary.emplace(read_vocabulary(*found->vocabulary, files));
      NpyVector<int64_t> frozen_ids;
      if (found->ids) frozen_ids = read_frozen_ids(*found->ids, files);
      categorical.emplace_back(*found, std::move(vocabulary), frozen_ids);
    }
  }

  [[noreturn]] static void refuse(const fs::path& directory) {
    throw ArtifactError(directory.string() +
                        " has an encoding of other columns than its inputs are");
  }

  // Number of dense features.
  size_t num_dense() const {
    size_t sum = 0;
    for (const DenseEncoder& each : dense) sum += each.size();
    return sum;
  }

  ArrayValues encode_dense(const Json& columns, SampleCount& count) const {
    std::vector<float> values;
    const size_t width = num_dense();
    size_t place = 0;
    for (const DenseEncoder& each : dense) {
      std::vector<const Json*> inputs;
      for (const std::string& name : each.inputs()) {
        inputs.push_back(
            &list_of_samples(column_of(columns, name), "column " + in_quotes(name)));
        count.add(name, static_cast<int64_t>(inputs.back()->size()));
      }
      const size_t samples = inputs[0]->size();
      if (place == 0) values.resize(samples * width);
      for (size_t i = 0; i < samples; ++i) {
        each.encode(inputs, static_cast<int64_t>(i), &values[i * width + place]);
      }
      place += each.size();
    }
    ArrayValues bytes(values.size() * sizeof(float));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  std::vector<Column> encode_categorical(const Json& columns, SampleCount& count) const {
    std::vector<Column> encoded;
    for (const CategoricalEncoder& each : categorical) {
      encoded.push_back(each.encode(column_of(columns, each.input())));
      count.add(each.input(), static_cast<int64_t>(encoded.back().offsets.size()) - 1);
    }
    return encoded;
  }
};

Encoder::Encoder(const fs::path& directory, const Manifest& manifest)
    : state_(std::make_unique<const State>(directory, manifest)) {}
Encoder::~Encoder() = default;

Request Encoder::decode(std::string_view json) const {
  const Json columns = parse_columns(json);
  Request request;
  SampleCount count;
  for (const InputSpec& input : state_->manifest.batch.inputs) {
    if (std::holds_alternative<ArraySpec>(input)) {
      request.inputs.emplace_back(state_->encode_dense(columns, count));
    } else {
      request.inputs.emplace_back(state_->encode_categorical(columns, count));
    }
  }
  request.samples = count.samples();
  check_request(state_->manifest, request);
  return request;
}

}  // namespace jaxrec::serving
