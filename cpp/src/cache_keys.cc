#include "cache_keys.h"

namespace jaxrec::serving {
namespace {

constexpr const char* kColumn = "cache_key";

// Text has a mark in front, so that the user 7 is not the user "7".
std::string read_key(const Json& value, int64_t sample) {
  if (value.is_string()) return '"' + value.get_ref<const std::string&>();
  if (value.is_number_unsigned()) return std::to_string(value.get<uint64_t>());
  if (is_whole(value)) return std::to_string(value.get<int64_t>());
  throw RequestError(in_sample("column " + in_quotes(kColumn), sample) +
                     "expected text, an integer or null, got " + excerpt(value));
}

}  // namespace

CacheKeys read_cache_keys(const Json& columns, SampleCount& count) {
  CacheKeys keys;
  const Json* first = nullptr;
  const Json& values =
      list_of_samples(column_of(columns, kColumn), "column " + in_quotes(kColumn));
  for (const Json& value : values) {
    const auto sample = static_cast<int64_t>(keys.size());
    keys.push_back(value.is_null() ? std::nullopt : std::optional(read_key(value, sample)));
    if (value.is_null()) continue;
    if (first == nullptr) first = &value;
    if (value.is_string() == first->is_string()) continue;
    throw RequestError(in_sample("column " + in_quotes(kColumn), sample) + excerpt(value) +
                       " is of another type than the values before it; give either text or "
                       "integers");
  }
  count.add(kColumn, static_cast<int64_t>(keys.size()));
  return keys;
}

}  // namespace jaxrec::serving
