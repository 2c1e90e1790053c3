#include "json.h"

#include <stdexcept>

namespace jaxrec::serving {
namespace {

constexpr int kMaxDepth = 64;

void check_depth(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) {
        throw std::invalid_argument("it is nested more than " + std::to_string(kMaxDepth) +
                                    " levels deep");
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

void write_python(const Json& value, std::string& out) {
  if (value.is_object()) {
    out += '{';
    bool is_first = true;
    for (const auto& [key, part] : value.items()) {
      if (!is_first) out += ", ";
      is_first = false;
      out += Json(key).dump(-1, ' ', /*ensure_ascii=*/true) + ": ";
      write_python(part, out);
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    bool is_first = true;
    for (const Json& part : value) {
      if (!is_first) out += ", ";
      is_first = false;
      write_python(part, out);
    }
    out += ']';
  } else if (value.is_number_float()) {
    throw std::invalid_argument("it has the number " + value.dump() + ", which is not whole");
  } else {
    out += value.dump(-1, ' ', /*ensure_ascii=*/true);
  }
}

}  // namespace

Json parse_json(std::string_view text) {
  check_depth(text);
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    // The library's message begins with its name and an error number in brackets.
    const std::string message = error.what();
    const size_t end = message.find("] ");
    throw std::invalid_argument("it is not JSON: " +
                                (end == std::string::npos ? message : message.substr(end + 2)));
  }
}

std::string python_json(const Json& value) {
  std::string out;
  write_python(value, out);
  return out;
}

std::string excerpt(const Json& value) {
  constexpr size_t kMost = 40;
  if (value.is_array() && value.size() > 8) {
    return "a list of " + std::to_string(value.size()) + " elements";
  }
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kMost) text = text.substr(0, kMost) + "...";
  return text;
}

std::string in_quotes(std::string_view name) { return "'" + std::string(name) + "'"; }

Fields::Fields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
  if (!object.is_object()) {
    throw std::invalid_argument(place_ + " must be an object, got " + excerpt(object));
  }
}

void Fields::fail(const std::string& field, const std::string& what) const {
  throw std::invalid_argument(place_ + ": " + in_quotes(field) + " " + what);
}

const Json& Fields::get(const std::string& field) {
  known_.insert(field);
  const auto found = object_.find(field);
  if (found == object_.end()) fail(field, "is missing");
  return *found;
}

bool Fields::has(const std::string& field) const {
  const auto found = object_.find(field);
  return found != object_.end() && !found->is_null();
}

std::string Fields::string(const std::string& field) {
  const Json& value = get(field);
  if (!value.is_string()) fail(field, "must be a string, got " + excerpt(value));
  return value.get<std::string>();
}

bool Fields::boolean(const std::string& field) {
  const Json& value = get(field);
  if (!value.is_boolean()) fail(field, "must be true or false, got " + excerpt(value));
  return value.get<bool>();
}

int64_t Fields::number(const std::string& field, int64_t least, int64_t most) {
  return whole(get(field), field, least, most);
}

const Json& Fields::list(const std::string& field) {
  const Json& value = get(field);
  if (!value.is_array()) fail(field, "must be a list, got " + excerpt(value));
  return value;
}

std::vector<std::string> Fields::strings(const std::string& field) {
  std::vector<std::string> strings;
  for (const Json& value : list(field)) {
    if (!value.is_string()) fail(field, "must list strings, got " + excerpt(value));
    strings.push_back(value.get<std::string>());
  }
  return strings;
}

std::vector<int64_t> Fields::numbers(const std::string& field, int64_t least) {
  std::vector<int64_t> numbers;
  for (const Json& value : list(field)) {
    numbers.push_back(whole(value, field, least, std::numeric_limits<int64_t>::max()));
  }
  return numbers;
}

int64_t Fields::whole(const Json& value, const std::string& field, int64_t least,
                      int64_t most) const {
  const bool fits =
      value.is_number_integer() &&
      !(value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most)) &&
      value.get<int64_t>() >= least && value.get<int64_t>() <= most;
  if (!fits) {
    fail(field, "must be a whole number of at least " + std::to_string(least) + ", got " +
                    excerpt(value));
  }
  return value.get<int64_t>();
}

void Fields::finish() const {
  for (const auto& [field, value] : object_.items()) {
    if (known_.count(field) == 0) fail(field, "is not a field that this version knows");
  }
}

}  // namespace jaxrec::serving
