// Times of requests, ISO 8601 text, and their parts; jaxrec/data/times.py does the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "jaxrec/serving/column_encoding.h"

namespace jaxrec::serving {

// Reads "2024-03-01", "2024-03-01 10:00:00.5" or "2024-03-01T10:00+02:00" as microseconds since
// 1970 in UTC, of which digits beyond are dropped; a text without a zone is in UTC. Returns nothing
// for other text.
std::optional<int64_t> parse_time(std::string_view text);

// Returns whether a time lies in the years 1 to 9999.
bool is_in_range(int64_t time);

// Returns the hour, weekday (0 is Monday) or month (from 1) of a time in UTC.
int64_t part_of(int64_t time, TimePart part);

// Returns a time as days since 1970.
double days(int64_t time);

}  // namespace jaxrec::serving
