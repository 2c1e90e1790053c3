// Requests in JSON.
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "bad_ids.h"
#include "cache_keys.h"
#include "half.h"
#include "jaxrec/serving/columns.h"
#include "jaxrec/serving/error.h"
#include "jaxrec/serving/request.h"
#include "json_columns.h"

namespace jaxrec::serving {
namespace {

std::string in_feature(const Feature& feature, int64_t sample) {
  return in_sample("feature " + in_quotes(feature.name), sample);
}

template <class Number>
void append(Number number, ArrayValues& out) {
  const size_t size = out.size();
  out.resize(size + sizeof number);
  std::memcpy(out.data() + size, &number, sizeof number);
}

template <class Integer>
void append_integer(const Json& value, ArrayValues& out) {
  using Limits = std::numeric_limits<Integer>;
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(Limits::max())) throw std::out_of_range("");
    append(static_cast<Integer>(number), out);
  } else {  // negative, or a float
    const auto number = value.get<int64_t>();
    if (number < static_cast<int64_t>(Limits::min()) ||
        (number > 0 && static_cast<uint64_t>(number) > static_cast<uint64_t>(Limits::max()))) {
      throw std::out_of_range("");
    }
    append(static_cast<Integer>(number), out);
  }
}

// Throws std::out_of_range where a number does not fit the type.
void append_number(DType dtype, const Json& value, ArrayValues& out) {
  if (is_floating(dtype)) {
    const double number = value.get<double>();
    if (dtype == DType::kFloat64) return append(number, out);
    const double most = dtype == DType::kFloat16 ? 65519.0 : std::numeric_limits<float>::max();
    if (std::fabs(number) > most) throw std::out_of_range("");
    const auto single = static_cast<float>(number);
    if (dtype == DType::kFloat32) return append(single, out);
    return append(dtype == DType::kFloat16 ? to_float16(single) : to_bfloat16(single), out);
  }
  switch (dtype) {
    case DType::kInt8: return append_integer<int8_t>(value, out);
    case DType::kInt16: return append_integer<int16_t>(value, out);
    case DType::kInt32: return append_integer<int32_t>(value, out);
    case DType::kInt64: return append_integer<int64_t>(value, out);
    case DType::kUInt8: return append_integer<uint8_t>(value, out);
    case DType::kUInt16: return append_integer<uint16_t>(value, out);
    case DType::kUInt32: return append_integer<uint32_t>(value, out);
    default: return append_integer<uint64_t>(value, out);
  }
}

// Reads the elements of one sample, or of a part of it.
class ArrayReader {
 public:
  ArrayReader(const ArraySpec& spec, const std::string& column, ArrayValues& out)
      : spec_(spec), name_("column " + in_quotes(column)), out_(out) {}

  void read(const Json& value, int64_t sample, size_t axis = 0) {
    if (axis == spec_.shape.size()) return read_element(value, sample);
    const auto size = static_cast<size_t>(spec_.shape[axis]);
    if (!value.is_array() || value.size() != size) {
      std::string shape = "[samples";
      for (const int64_t each : spec_.shape) shape += ", " + std::to_string(each);
      throw RequestError(in_sample(name_, sample) + "it must have the shape " + shape +
                         "], got " +
                         (value.is_array() ? std::to_string(value.size()) + " elements instead of " +
                                                 std::to_string(size)
                                           : excerpt(value)));
    }
    for (const Json& part : value) read(part, sample, axis + 1);
  }

 private:
  void read_element(const Json& value, int64_t sample) {
    const bool is_bool = spec_.dtype == DType::kBool;
    const bool fits = is_bool ? value.is_boolean()
                              : is_floating(spec_.dtype) ? value.is_number()
                                                         : is_whole(value);
    const std::string dtype(name_of(spec_.dtype));
    if (!fits) {
      throw RequestError(in_sample(name_, sample) + "it must be an array of " + dtype +
                         ", got " + excerpt(value));
    }
    if (is_bool) return append(static_cast<uint8_t>(value.get<bool>()), out_);
    try {
      append_number(spec_.dtype, value, out_);
    } catch (const std::out_of_range&) {
      throw RequestError(in_sample(name_, sample) + excerpt(value) + " does not fit " + dtype);
    }
  }

  const ArraySpec& spec_;
  const std::string name_;
  ArrayValues& out_;
};

ArrayValues read_array(const ArraySpec& spec, const std::string& name, const Json& value,
                       int64_t& samples) {
  ArrayValues out;
  ArrayReader reader(spec, name, out);
  for (const Json& each : list_of_samples(value, "column " + in_quotes(name))) {
    reader.read(each, samples++);
  }
  return out;
}

int64_t read_id(const Feature& feature, const Json& value, int64_t sample) {
  if (is_whole(value)) {
    if (!value.is_number_unsigned()) return value.get<int64_t>();
    const auto id = value.get<uint64_t>();
    if (id <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return static_cast<int64_t>(id);
    }
    throw RequestError(bad_id(feature, sample, std::to_string(id), false));
  }
  throw RequestError(in_feature(feature, sample) + "an id must be a whole number, got " +
                     excerpt(value));
}

float read_weight(const Feature& feature, const Json& value, int64_t sample) {
  if (!value.is_number() ||
      std::fabs(value.get<double>()) > std::numeric_limits<float>::max()) {
    throw RequestError(in_feature(feature, sample) + "a weight must be a number of float32, got " +
                       excerpt(value));
  }
  return value.get<float>();
}

const Json& bag_of(const Json& value, const Feature& feature, int64_t sample) {
  if (!value.is_array()) {
    throw RequestError(in_feature(feature, sample) + "the ids must be a list, got " +
                       excerpt(value));
  }
  return value;
}

Column read_ids(const Feature& feature, const Json& bags) {
  Column column;
  int64_t sample = 0;
  for (const Json& bag : list_of_samples(bags, "feature " + in_quotes(feature.name))) {
    for (const Json& id : bag_of(bag, feature, sample)) {
      column.ids.push_back(read_id(feature, id, sample));
    }
    column.offsets.push_back(static_cast<int64_t>(column.ids.size()));
    ++sample;
  }
  return column;
}

void read_weights(const Feature& feature, const Json& bags, Column& column) {
  const std::string name = "the weights of feature " + in_quotes(feature.name);
  int64_t sample = 0;
  if (list_of_samples(bags, name).size() != column.offsets.size() - 1) {
    throw RequestError(name + " are of " + std::to_string(bags.size()) + " samples, its ids of " +
                       std::to_string(column.offsets.size() - 1));
  }
  for (const Json& bag : bags) {
    const auto i = static_cast<size_t>(sample);
    const int64_t count = column.offsets[i + 1] - column.offsets[i];
    if (bag_of(bag, feature, sample).size() != static_cast<size_t>(count)) {
      throw RequestError(in_feature(feature, sample) + std::to_string(bag.size()) +
                         " weights of " + std::to_string(count) + " ids");
    }
    for (const Json& weight : bag) column.weights.push_back(read_weight(feature, weight, sample));
    ++sample;
  }
}

std::vector<Column> read_ragged(const RaggedSpec& ragged, const ColumnNames& names,
                                const Json& columns) {
  std::vector<Column> read;
  for (size_t i = 0; i < names.size(); ++i) {
    const Feature& feature = ragged.features[i];
    read.push_back(read_ids(feature, column_of(columns, names[i])));
    const std::string weights = names[i] + ".weights";
    if (ragged.is_weighted) {
      read_weights(feature, column_of(columns, weights), read.back());
    } else if (columns.contains(weights)) {
      throw RequestError("the request has the column " + in_quotes(weights) +
                         ", and the model was exported for batches without weights");
    }
  }
  return read;
}

Request read_request(const Manifest& manifest, const Json& columns) {
  const BatchSpec& spec = manifest.batch;
  const std::vector<ColumnNames> names = input_columns(spec);
  Request request;
  SampleCount count;
  if (manifest.ranker) request.cache_keys = read_cache_keys(columns, count);
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    if (const auto* array = std::get_if<ArraySpec>(&spec.inputs[i])) {
      int64_t samples = 0;
      request.inputs.emplace_back(
          read_array(*array, names[i][0], column_of(columns, names[i][0]), samples));
      count.add(names[i][0], samples);
      continue;
    }
    const auto& ragged = std::get<RaggedSpec>(spec.inputs[i]);
    std::vector<Column> read = read_ragged(ragged, names[i], columns);
    for (size_t k = 0; k < read.size(); ++k) {
      count.add(names[i][k], static_cast<int64_t>(read[k].offsets.size()) - 1);
    }
    request.inputs.emplace_back(std::move(read));
  }
  request.samples = count.samples();
  return request;
}

}  // namespace

Request decode_request(const Manifest& manifest, std::string_view json) {
  Request request = read_request(manifest, parse_columns(json));
  check_request(manifest, request);
  return request;
}

}  // namespace jaxrec::serving
