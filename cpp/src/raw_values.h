// Raw values of requests: their times, and the messages about wrong ones.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "json_columns.h"
#include "times.h"

namespace jaxrec::serving {

// The start of a message about a value that has the right type.
inline std::string in_row(const std::string& column, int64_t sample) {
  return "the request, row " + std::to_string(sample) + " (from 0), column " + in_quotes(column) +
         ": ";
}

// The start of a message about a value of another type.
inline std::string in_column(const std::string& column, int64_t sample) {
  return in_sample("column " + in_quotes(column), sample);
}

// Reads the time of a sample in a column of a request; nothing for null.
inline std::optional<int64_t> read_time(const Json& value, const std::string& column,
                                        int64_t sample) {
  if (value.is_null()) return std::nullopt;
  if (!value.is_string()) {
    throw RequestError(in_column(column, sample) + "expected text or null, got " + excerpt(value));
  }
  const auto& text = value.get_ref<const std::string&>();
  const std::optional<int64_t> time = parse_time(text);
  if (!time) {
    throw RequestError(in_row(column, sample) + excerpt(value) +
                       " is no time; write it as 2024-03-01T10:00:00Z, 2024-03-01 10:00:00 or "
                       "2024-03-01");
  }
  if (!is_in_range(*time)) {
    throw RequestError(in_row(column, sample) +
                       "the time is outside of the years 1 to 9999; make it null");
  }
  return time;
}

}  // namespace jaxrec::serving
