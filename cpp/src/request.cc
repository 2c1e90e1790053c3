#include "jaxrec/serving/request.h"

#include <algorithm>

#include "bad_ids.h"
#include "batch_ladder.h"
#include "jaxrec/serving/error.h"
#include "ranker_rows.h"

namespace jaxrec::serving {
namespace {

[[noreturn]] void fail(const std::string& message) { throw RequestError(message); }

void check_offsets(const Feature& feature, const Column& column, int64_t samples, bool is_weighted) {
  const std::vector<int64_t>& offsets = column.offsets;
  const std::string name = "feature '" + feature.name + "'";
  if (offsets.size() != static_cast<size_t>(samples) + 1 || offsets.front() != 0 ||
      offsets.back() != static_cast<int64_t>(column.ids.size()) ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    fail(name + " has offsets that do not begin with 0, ascend and end with its " +
         std::to_string(column.ids.size()) + " ids after " + std::to_string(samples) + " samples");
  }
  const size_t weights = is_weighted ? column.ids.size() : 0;
  if (column.weights.size() != weights) {
    fail(name + " has " + std::to_string(column.weights.size()) + " weights instead of " +
         std::to_string(weights));
  }
}

void check_ids(const Feature& feature, const Column& column) {
  const int64_t bound = feature.bound();
  const auto is_bad = [bound](int64_t id) { return id < 0 || id >= bound; };
  const auto found = std::find_if(column.ids.begin(), column.ids.end(), is_bad);
  if (found == column.ids.end()) return;
  const int64_t position = found - column.ids.begin();
  const auto after = std::upper_bound(column.offsets.begin(), column.offsets.end(), position);
  fail(bad_id(feature, after - column.offsets.begin() - 1, std::to_string(*found), *found < 0));
}

void check_fixed(const Feature& feature, const Column& column) {
  if (!feature.fixed) return;
  for (size_t i = 0; i + 1 < column.offsets.size(); ++i) {
    const int64_t count = column.offsets[i + 1] - column.offsets[i];
    if (count == *feature.fixed) continue;
    const std::string fixed = std::to_string(*feature.fixed);
    fail("feature '" + feature.name + "', sample " + std::to_string(i) + ": " +
         std::to_string(count) + " ids, but the model was exported for " + fixed +
         " in each sample; give as many, or export it with ids_per_sample for this feature");
  }
}

// Checks that each sample fits a batch by itself: those whose samples do not fit together are cut.
void check_lengths(const BatchSpec& spec, const Request& request) {
  for (int64_t start = 0; start < request.samples;) {
    start = next_chunk(spec, request, start).stop;
  }
}

}  // namespace

void check_request(const Manifest& manifest, const Request& request) {
  const BatchSpec& spec = manifest.batch;
  if (request.samples < 0 || request.inputs.size() != spec.inputs.size()) {
    fail("the model takes " + std::to_string(spec.inputs.size()) + " inputs, got " +
         std::to_string(request.inputs.size()));
  }
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    const std::string& name = name_of(spec.inputs[i]);
    if (const auto* array = std::get_if<ArraySpec>(&spec.inputs[i])) {
      const auto* values = std::get_if<ArrayValues>(&request.inputs[i]);
      if (values == nullptr) fail(name + " must be an array");
      const size_t bytes = array->bytes() * static_cast<size_t>(request.samples);
      if (values->size() != bytes) {
        fail(name + " has " + std::to_string(values->size()) + " bytes instead of " +
             std::to_string(bytes));
      }
      continue;
    }
    const auto& ragged = std::get<RaggedSpec>(spec.inputs[i]);
    const auto* columns = std::get_if<std::vector<Column>>(&request.inputs[i]);
    if (columns == nullptr || columns->size() != ragged.features.size()) {
      fail(name + " must have a column for each of its " + std::to_string(ragged.features.size()) +
           " features");
    }
    for (size_t k = 0; k < columns->size(); ++k) {
      const Feature& feature = ragged.features[k];
      check_offsets(feature, (*columns)[k], request.samples, ragged.is_weighted);
      check_fixed(feature, (*columns)[k]);
      check_ids(feature, (*columns)[k]);
    }
  }
  if (manifest.ranker) {
    check_rows(*manifest.ranker, spec, request);
  } else {
    check_lengths(spec, request);
  }
}

Request join(const BatchSpec& spec, const std::vector<const Request*>& requests) {
  Request joined;
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    if (std::holds_alternative<ArraySpec>(spec.inputs[i])) {
      ArrayValues values;
      for (const Request* each : requests) {
        const auto& part = std::get<ArrayValues>(each->inputs[i]);
        values.insert(values.end(), part.begin(), part.end());
      }
      joined.inputs.emplace_back(std::move(values));
      continue;
    }
    std::vector<Column> columns(std::get<RaggedSpec>(spec.inputs[i]).features.size());
    for (const Request* each : requests) {
      const auto& parts = std::get<std::vector<Column>>(each->inputs[i]);
      for (size_t k = 0; k < columns.size(); ++k) {
        Column& column = columns[k];
        const Column& part = parts[k];
        const int64_t first = column.offsets.back();
        column.ids.insert(column.ids.end(), part.ids.begin(), part.ids.end());
        column.weights.insert(column.weights.end(), part.weights.begin(), part.weights.end());
        for (size_t s = 1; s < part.offsets.size(); ++s) {
          column.offsets.push_back(first + part.offsets[s]);
        }
      }
    }
    joined.inputs.emplace_back(std::move(columns));
  }
  for (const Request* each : requests) {
    joined.samples += each->samples;
    const CacheKeys& keys = each->cache_keys;
    joined.cache_keys.insert(joined.cache_keys.end(), keys.begin(), keys.end());
  }
  return joined;
}

Request slice(const BatchSpec& spec, const Request& request, int64_t start, int64_t stop) {
  Request part;
  part.samples = stop - start;
  if (!request.cache_keys.empty()) {
    const auto first = request.cache_keys.begin();
    part.cache_keys.assign(first + start, first + stop);
  }
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    if (const auto* array = std::get_if<ArraySpec>(&spec.inputs[i])) {
      const std::byte* values = std::get<ArrayValues>(request.inputs[i]).data();
      const auto bytes = static_cast<int64_t>(array->bytes());
      part.inputs.emplace_back(ArrayValues(values + start * bytes, values + stop * bytes));
      continue;
    }
    std::vector<Column> columns;
    for (const Column& whole : std::get<std::vector<Column>>(request.inputs[i])) {
      const int64_t first = whole.offsets[static_cast<size_t>(start)];
      const int64_t last = whole.offsets[static_cast<size_t>(stop)];
      Column column;
      column.ids.assign(whole.ids.begin() + first, whole.ids.begin() + last);
      if (!whole.weights.empty()) {
        column.weights.assign(whole.weights.begin() + first, whole.weights.begin() + last);
      }
      for (int64_t s = start + 1; s <= stop; ++s) {
        column.offsets.push_back(whole.offsets[static_cast<size_t>(s)] - first);
      }
      columns.push_back(std::move(column));
    }
    part.inputs.emplace_back(std::move(columns));
  }
  return part;
}

}  // namespace jaxrec::serving
