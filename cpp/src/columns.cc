#include "jaxrec/serving/columns.h"

#include <algorithm>
#include <map>

namespace jaxrec::serving {
namespace {

// Returns the keys and indices of a place such as "output['a'][0]".
std::vector<std::string> keys_of(const std::string& place, bool with_indices) {
  std::vector<std::string> keys;
  size_t start = 0;
  while ((start = place.find('[', start)) != std::string::npos) {
    const bool is_key = place.compare(start, 2, "['") == 0;
    const size_t end = place.find(is_key ? "']" : "]", start);
    if (end == std::string::npos) break;
    const size_t first = start + (is_key ? 2 : 1);
    if (is_key || with_indices) keys.push_back(place.substr(first, end - first));
    start = end;
  }
  return keys;
}

}  // namespace

std::vector<ColumnNames> input_columns(const BatchSpec& spec) {
  std::vector<ColumnNames> columns;
  std::map<std::string, int> count;
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    ColumnNames& names = columns.emplace_back();
    if (const auto* ragged = std::get_if<RaggedSpec>(&spec.inputs[i])) {
      for (const Feature& feature : ragged->features) names.push_back(feature.name);
    } else {
      const std::vector<std::string> keys = keys_of(name_of(spec.inputs[i]), false);
      names.push_back(keys.empty() ? "input" + std::to_string(i) : keys.back());
    }
    for (const std::string& name : names) ++count[name];
  }
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    const std::string& place = name_of(spec.inputs[i]);
    const bool is_array = std::holds_alternative<ArraySpec>(spec.inputs[i]);
    for (std::string& name : columns[i]) {
      if (count[name] > 1) name = is_array ? place : place + "." + name;
    }
  }
  return columns;
}

ColumnNames output_columns(const Manifest& manifest) {
  ColumnNames columns;
  for (const ArraySpec& output : manifest.outputs) {
    std::string name;
    for (const std::string& key : keys_of(output.name, true)) {
      name += (name.empty() ? "" : ".") + key;
    }
    columns.push_back(name.empty() ? "score" : name);
  }
  return columns;
}

}  // namespace jaxrec::serving
