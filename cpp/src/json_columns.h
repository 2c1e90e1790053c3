// Columns of a request in JSON: their names, samples and errors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "jaxrec/serving/error.h"
#include "json.h"

namespace jaxrec::serving {

inline std::string in_sample(const std::string& name, int64_t sample) {
  return name + ", sample " + std::to_string(sample) + ": ";
}

// Reads the text of a request, columns by name. Throws RequestError where it is something else.
Json parse_columns(std::string_view json);

// Returns a column of a request. Throws RequestError where it is missing.
const Json& column_of(const Json& columns, const std::string& name);

// Checks that a value has an element for each sample. Throws RequestError, which begins with the
// value's name.
const Json& list_of_samples(const Json& value, const std::string& name);

// Returns whether a number is an integer, or a float such as 3.0: whole, and no larger than those
// that leave integers out. `get<int64_t>` then returns the integer.
bool is_whole(const Json& value);

// Takes the number of samples of a column, which must be that of the first one.
class SampleCount {
 public:
  void add(const std::string& name, int64_t samples);
  int64_t samples() const { return samples_; }

 private:
  std::string first_;
  bool is_first_ = true;
  int64_t samples_ = 0;
};

}  // namespace jaxrec::serving
