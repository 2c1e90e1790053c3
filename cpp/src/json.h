// JSON as nlohmann's library reads it, checked: nesting, types, fields that are missing or unknown.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace jaxrec::serving {

using Json = nlohmann::ordered_json;  // objects keep their order

// Reads a text. Throws std::invalid_argument where it is not JSON, or nested deeper than functions
// that call themselves may follow.
Json parse_json(std::string_view text);

// Returns a value as Python's json.dumps writes it, from which the manifest's checksum is computed.
// Throws std::invalid_argument for a number with a fraction.
std::string python_json(const Json& value);

// Returns the start of a value for a message.
std::string excerpt(const Json& value);

std::string in_quotes(std::string_view name);

// The fields of an object, each of which must be read. Throws std::invalid_argument where one has
// another type, is missing or unknown; messages begin with the object's place.
class Fields {
 public:
  Fields(const Json& object, std::string place);

  const Json& get(const std::string& field);
  std::string string(const std::string& field);
  bool boolean(const std::string& field);
  int64_t number(const std::string& field, int64_t least,
                 int64_t most = std::numeric_limits<int64_t>::max());
  const Json& list(const std::string& field);
  // Fields that may be missing.
  bool has(const std::string& field) const;  // ... and are not null
  std::vector<std::string> strings(const std::string& field);
  std::vector<int64_t> numbers(const std::string& field, int64_t least);

  // Throws where the object has other fields.
  void finish() const;

  const std::string& place() const { return place_; }

 private:
  [[noreturn]] void fail(const std::string& field, const std::string& what) const;
  int64_t whole(const Json& value, const std::string& field, int64_t least, int64_t most) const;

  const Json& object_;
  const std::string place_;
  std::set<std::string> known_;
};

}  // namespace jaxrec::serving
