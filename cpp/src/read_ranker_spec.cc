#include "read_ranker_spec.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <variant>

#include "read_batch_spec.h"

namespace jaxrec::serving {
namespace {

using Problem = std::invalid_argument;

constexpr int64_t kMostValues = (int64_t{1} << 31) - 1;  // of a feature in one call

// Lengths, newest and request, the last arrays of a cache: one number each.
constexpr size_t kScalars = 3;

RankerStep step_of(const std::string& name) {
  if (name == "encode") return RankerStep::kEncode;
  if (name == "append") return RankerStep::kAppend;
  if (name == "score") return RankerStep::kScore;
  throw Problem("a program of the ranker has the step " + in_quotes(name));
}

CacheSize read_cache(const Json& value) {
  Fields fields(value, "a cache");
  CacheSize size;
  size.events = fields.number("events", 1, kMostValues);
  for (const Json& array : fields.list("arrays")) {
    Fields of_array(array, "an array of a cache");
    size.arrays.push_back(read_array(of_array));
    of_array.finish();
  }
  fields.finish();
  return size;
}

RankerProgram read_program(const Json& value) {
  Fields fields(value, "a program of the ranker");
  RankerProgram program;
  program.platform = fields.string("platform");
  program.step = step_of(fields.string("step"));
  program.events = fields.number("events", 1, kMostValues);
  program.count = fields.number("count", 0, kMostValues);
  program.file = fields.string("file");
  program.targets = fields.strings("targets");
  program.stablehlo = fields.string("stablehlo");
  fields.finish();
  return program;
}

void check_sizes(const std::string& what, const std::vector<int64_t>& sizes) {
  int64_t last = 0;
  for (const int64_t size : sizes) {
    if (size <= last || size > kMostValues) throw Problem("its " + what + " do not ascend from 1");
    last = size;
  }
}

// Requires a history and candidates of one row, each a ragged input.
void check_batch(const RankerSpec& ranker, const BatchSpec& batch) {
  const auto is_ragged = [](const InputSpec& input) {
    const auto* ragged = std::get_if<RaggedSpec>(&input);
    return ragged != nullptr && !ragged->is_weighted && !ragged->features.empty();
  };
  if (batch.inputs.size() != 2 ||
      !std::all_of(batch.inputs.begin(), batch.inputs.end(), is_ragged) ||
      batch.sizes.size() != 1 || batch.sizes[0].samples != 1) {
    throw Problem("its batch is not a history and candidates of one row");
  }
  const auto& history = std::get<RaggedSpec>(batch.inputs[0]).features;
  const auto& candidates = std::get<RaggedSpec>(batch.inputs[1]).features;
  const auto has_name = [](const Feature& feature, const std::string& name) {
    return feature.name == name;
  };
  if (history.size() <= ranker.context.size() ||
      !std::equal(ranker.context.begin(), ranker.context.end(), history.begin(),
                  [&](const auto& name, const auto& feature) { return has_name(feature, name); })) {
    throw Problem("the first features of its history are not those of its context");
  }
  if (ranker.request_time &&
      std::none_of(candidates.begin(), candidates.end(),
                   [&](const auto& feature) { return has_name(feature, *ranker.request_time); })) {
    throw Problem("it has no feature " + in_quotes(*ranker.request_time) + " of candidates");
  }
  const auto are_of = [](auto first, auto last, int64_t capacity) {
    return std::all_of(first, last, [&](int64_t each) { return each == capacity; });
  };
  const auto& capacities = batch.sizes[0].capacities;
  const auto of_events = capacities[0].begin() + static_cast<int64_t>(ranker.context.size());
  if (!are_of(of_events, capacities[0].end(), ranker.caches.back().events) ||
      !are_of(capacities[1].begin(), capacities[1].end(), capacities[1][0])) {
    throw Problem("its batch has other capacities than its largest history size");
  }
}

// Requires arrays that become those of a larger size by more tokens.
void check_caches(const std::vector<CacheSize>& caches) {
  const auto grows = [](const ArraySpec& from, const ArraySpec& to) {
    if (from.name != to.name || from.dtype != to.dtype || from.shape.size() != to.shape.size()) {
      return false;
    }
    return from.shape.empty() || (from.shape[0] <= to.shape[0] &&
                                  std::equal(from.shape.begin() + 1, from.shape.end(),
                                             to.shape.begin() + 1));
  };
  const CacheSize* last = &caches.front();
  for (const CacheSize& size : caches) {
    const std::string name = "its caches of " + std::to_string(size.events) + " events";
    if (!std::equal(last->arrays.begin(), last->arrays.end(), size.arrays.begin(),
                    size.arrays.end(), grows)) {
      throw Problem(name + " have other arrays than the smaller ones");
    }
    const auto is_scalar = [](const ArraySpec& array) {
      return array.dtype == DType::kInt32 && array.shape.empty();
    };
    if (size.arrays.size() < kScalars ||
        !std::all_of(size.arrays.end() - kScalars, size.arrays.end(), is_scalar)) {
      throw Problem(name + " do not end in three numbers");
    }
    last = &size;
  }
}

// Requires a program for each step and size of each platform.
void check_programs(const RankerSpec& ranker) {
  using Size = std::tuple<RankerStep, int64_t, int64_t>;
  std::set<Size> steps;
  for (const CacheSize& size : ranker.caches) {
    steps.emplace(RankerStep::kEncode, size.events, 0);
    for (const int64_t count : ranker.append_sizes) {
      steps.emplace(RankerStep::kAppend, size.events, count);
    }
    for (const int64_t count : ranker.candidate_sizes) {
      steps.emplace(RankerStep::kScore, size.events, count);
    }
  }
  std::map<std::string, std::multiset<Size>> by_platform;
  for (const RankerProgram& each : ranker.programs) {
    by_platform[each.platform].emplace(each.step, each.events, each.count);
  }
  for (const auto& [platform, sizes] : by_platform) {
    if (!std::equal(sizes.begin(), sizes.end(), steps.begin(), steps.end())) {
      throw Problem("its programs for " + platform + " are not one for each step and size");
    }
  }
}

}  // namespace

RankerSpec read_ranker_spec(const Json& value, const BatchSpec& batch) {
  Fields fields(value, "the ranker");
  RankerSpec ranker;
  ranker.context = fields.strings("context");
  fields.get("request_time");
  if (fields.has("request_time")) ranker.request_time = fields.string("request_time");
  std::vector<int64_t> history_sizes;
  for (const Json& cache : fields.list("caches")) {
    ranker.caches.push_back(read_cache(cache));
    history_sizes.push_back(ranker.caches.back().events);
  }
  ranker.candidate_sizes = fields.numbers("candidate_sizes", 1);
  ranker.append_sizes = fields.numbers("append_sizes", 1);
  for (const Json& program : fields.list("programs")) {
    ranker.programs.push_back(read_program(program));
  }
  fields.finish();
  if (ranker.caches.empty()) throw Problem("it has no history sizes");
  if (ranker.candidate_sizes.empty()) throw Problem("it has no candidate sizes");
  check_sizes("history sizes", history_sizes);
  check_sizes("candidate sizes", ranker.candidate_sizes);
  check_sizes("append sizes", ranker.append_sizes);
  check_batch(ranker, batch);
  check_caches(ranker.caches);
  check_programs(ranker);
  return ranker;
}

}  // namespace jaxrec::serving
