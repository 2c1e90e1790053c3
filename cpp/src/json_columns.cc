#include "json_columns.h"

#include <cmath>
#include <stdexcept>

namespace jaxrec::serving {

Json parse_columns(std::string_view json) {
  Json columns;
  try {
    columns = parse_json(json);
  } catch (const std::invalid_argument& error) {
    throw RequestError("the request cannot be read: " + std::string(error.what()));
  }
  if (!columns.is_object()) {
    throw RequestError("a request must be an object of columns by name, got " + excerpt(columns));
  }
  return columns;
}

const Json& column_of(const Json& columns, const std::string& name) {
  const auto found = columns.find(name);
  if (found == columns.end()) {
    throw RequestError("the request has no column " + in_quotes(name) + ", which the model reads");
  }
  return *found;
}

const Json& list_of_samples(const Json& value, const std::string& name) {
  if (!value.is_array()) {
    throw RequestError(name + " must be a list with an element for each sample, got " +
                       excerpt(value));
  }
  return value;
}

bool is_whole(const Json& value) {
  constexpr double kMost = 9007199254740992.0;  // 2**53
  if (!value.is_number_float()) return value.is_number_integer();
  const double number = value.get<double>();
  return std::fabs(number) <= kMost && number == std::floor(number);
}

void SampleCount::add(const std::string& name, int64_t samples) {
  if (is_first_) {
    is_first_ = false;
    first_ = name;
    samples_ = samples;
  } else if (samples != samples_) {
    throw RequestError("column " + in_quotes(name) + " has " + std::to_string(samples) +
                       " samples, but column " + in_quotes(first_) + " has " +
                       std::to_string(samples_) + "; give one value or list for each sample");
  }
}

}  // namespace jaxrec::serving
