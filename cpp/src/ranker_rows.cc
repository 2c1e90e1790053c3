#include "ranker_rows.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <variant>

#include "jaxrec/serving/error.h"
#include "json_columns.h"

namespace jaxrec::serving {
namespace {

// Features of a request, and the values that rows have of them.
struct Features {
  const Feature* specs;
  const Column* columns;
  size_t count;
};

// Splits the history into context and events.
Features part_of(const BatchSpec& batch, const Request& request, size_t input, size_t first,
                 size_t last) {
  const auto& features = std::get<RaggedSpec>(batch.inputs[input]).features;
  const auto& columns = std::get<std::vector<Column>>(request.inputs[input]);
  const size_t stop = std::min(last, features.size());
  return {features.data() + first, columns.data() + first, stop - first};
}

constexpr size_t kAll = static_cast<size_t>(-1);

Features context_of(const RankerSpec& ranker, const BatchSpec& batch, const Request& request) {
  return part_of(batch, request, 0, 0, ranker.context.size());
}

Features events_of(const RankerSpec& ranker, const BatchSpec& batch, const Request& request) {
  return part_of(batch, request, 0, ranker.context.size(), kAll);
}

Features candidates_of(const BatchSpec& batch, const Request& request) {
  return part_of(batch, request, 1, 0, kAll);
}

int64_t length(const Column& column, size_t row) {
  return column.offsets[row + 1] - column.offsets[row];
}

// Writes a number as Python's "{:,}" does.
std::string with_commas(int64_t number) {
  std::string text = std::to_string(number);
  for (int64_t place = static_cast<int64_t>(text.size()) - 3; place > 0; place -= 3) {
    text.insert(static_cast<size_t>(place), 1, ',');
  }
  return text;
}

[[noreturn]] void fail(const Feature& feature, size_t row, const std::string& problem) {
  throw RequestError(in_sample("feature " + in_quotes(feature.name), static_cast<int64_t>(row)) +
                     problem);
}

// Requires that a row has no more values of a feature than there is space for.
void check_most(const Feature& feature, const Column& column, int64_t most, std::string_view what,
                std::string_view hint) {
  for (size_t row = 0; row + 1 < column.offsets.size(); ++row) {
    if (length(column, row) <= most) continue;
    fail(feature, row, with_commas(length(column, row)) + " " + std::string(what) +
                           ", and the ranker takes " + with_commas(most) + " at most; " +
                           std::string(hint));
  }
}

// Requires that a row has equally many values of each feature.
void check_equal(const Features& features, std::string_view what) {
  const Column& first = features.columns[0];
  for (size_t i = 1; i < features.count; ++i) {
    for (size_t row = 0; row + 1 < first.offsets.size(); ++row) {
      const int64_t count = length(features.columns[i], row);
      if (count == length(first, row)) continue;
      fail(features.specs[i], row,
           with_commas(count) + " values, but " + with_commas(length(first, row)) + " of feature " +
               in_quotes(features.specs[0].name) + "; the features of " + std::string(what) +
               " have a value for each of them");
    }
  }
}

std::vector<Values> values_of(const Features& features, size_t row) {
  std::vector<Values> values;
  for (size_t i = 0; i < features.count; ++i) {
    const Column& column = features.columns[i];
    const auto first = column.ids.begin() + column.offsets[row];
    const auto last = column.ids.begin() + column.offsets[row + 1];
    Values& each = values.emplace_back();
    each.reserve(static_cast<size_t>(last - first));
    std::transform(first, last, std::back_inserter(each),
                   [](int64_t id) { return static_cast<int32_t>(id); });
  }
  return values;
}

}  // namespace

void check_rows(const RankerSpec& ranker, const BatchSpec& batch, const Request& request) {
  if (request.cache_keys.size() != static_cast<size_t>(request.samples)) {
    throw RequestError("the request has " + std::to_string(request.cache_keys.size()) +
                       " keys of caches for " + std::to_string(request.samples) + " samples");
  }
  const auto& capacities = batch.sizes[0].capacities;
  const Features context = context_of(ranker, batch, request);
  for (size_t i = 0; i < context.count; ++i) {
    check_most(context.specs[i], context.columns[i], capacities[0][i], "ids",
               "send fewer");
  }
  const Features events = events_of(ranker, batch, request);
  const Features candidates = candidates_of(batch, request);
  check_equal(events, "events");
  check_equal(candidates, "candidates");
  check_most(events.specs[0], events.columns[0], capacities[0].back(), "events",
             "send the newest ones, or export it with larger history_sizes");
  check_most(candidates.specs[0], candidates.columns[0], capacities[1].front(), "candidates",
             "send fewer, or export it with larger max_candidates");
}

Row row_of(const RankerSpec& ranker, const BatchSpec& batch, const Request& request,
           int64_t number) {
  const auto i = static_cast<size_t>(number);
  Row row;
  row.key = request.cache_keys[i];
  row.history.context = values_of(context_of(ranker, batch, request), i);
  row.history.events = values_of(events_of(ranker, batch, request), i);
  const Features candidates = candidates_of(batch, request);
  row.candidates = values_of(candidates, i);
  for (size_t k = 0; ranker.request_time && k < candidates.count; ++k) {
    if (candidates.specs[k].name == *ranker.request_time && row.num_candidates() > 0) {
      row.history.request_time = row.candidates[k].back();
    }
  }
  return row;
}

}  // namespace jaxrec::serving
