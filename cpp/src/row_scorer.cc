#include "row_scorer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "batch_ladder.h"

namespace jaxrec::serving {
namespace {

// The smallest size that holds a number; the largest must.
int64_t size_that_holds(const std::vector<int64_t>& sizes, int64_t number) {
  return *std::lower_bound(sizes.begin(), sizes.end(), number);
}

// The values and lengths of one row, as a program takes them.
class RowInputs {
 public:
  // Room for `capacities[i]` values of feature i.
  explicit RowInputs(const std::vector<int64_t>& capacities)
      : values_(sum(capacities) * sizeof(int32_t)), lengths_(capacities.size() * sizeof(int32_t)) {
    arrays_ = {{values_.data(), DType::kInt32, {static_cast<int64_t>(sum(capacities))}},
               {lengths_.data(), DType::kInt32, {static_cast<int64_t>(capacities.size())}}};
    size_t first = 0;
    for (const int64_t capacity : capacities) {
      firsts_.push_back(first);
      first += static_cast<size_t>(capacity);
    }
  }

  // Puts the next feature's values from `start` to `stop`.
  void add(const Values& values, int64_t start, int64_t stop) {
    const size_t feature = used_++;
    const auto count = static_cast<int32_t>(stop - start);
    std::copy(values.begin() + start, values.begin() + stop,
              reinterpret_cast<int32_t*>(values_.data()) + firsts_[feature]);
    reinterpret_cast<int32_t*>(lengths_.data())[feature] = count;
  }

  const std::vector<HostArray>& arrays() const { return arrays_; }

 private:
  static size_t sum(const std::vector<int64_t>& capacities) {
    size_t sum = 0;
    for (const int64_t capacity : capacities) sum += static_cast<size_t>(capacity);
    return sum;
  }

  Buffer values_, lengths_;
  std::vector<HostArray> arrays_;
  std::vector<size_t> firsts_;
  size_t used_ = 0;
};

Arguments arguments_of(const RuntimeArrays& arrays) {
  Arguments arguments;
  for (const auto& each : arrays) arguments.push_back(each.get());
  return arguments;
}

}  // namespace

void RowScorer::score(const Row& row, std::vector<std::vector<std::byte>>& outputs) {
  const SharedCache cache = cache_of(row);
  const Arguments arguments = arguments_of(cache->arrays);
  const int64_t most = ranker_.candidate_sizes.back();
  for (int64_t start = 0; start < row.num_candidates(); start += most) {
    const int64_t stop = std::min(start + most, row.num_candidates());
    const int64_t size = size_that_holds(ranker_.candidate_sizes, stop - start);
    RowInputs inputs(std::vector<int64_t>(row.candidates.size(), size));
    for (const Values& values : row.candidates) inputs.add(values, start, stop);
    const RuntimeArrays results =
        programs_.run(RankerStep::kScore, cache->size, size, arguments, inputs.arrays());
    for (size_t i = 0; i < outputs.size(); ++i) {
      const size_t bytes = manifest_.outputs[i].bytes() * static_cast<size_t>(stop - start);
      outputs[i].insert(outputs[i].end(), results[i]->data(), results[i]->data() + bytes);
    }
  }
}

// Returns the encoded history of a row: cached, appended to, or encoded anew.
SharedCache RowScorer::cache_of(const Row& row) {
  if (!row.key) {
    caches_.count(&CacheCounts::misses);
    return encode(row.history);
  }
  const auto is_complete = [&](const SharedCache& cache) {
    return cache != nullptr && cache->history.num_events() == row.history.num_events();
  };
  SharedCache known = known_cache(row);
  if (!is_complete(known)) {
    // Another thread may encode this history at the moment; then it is cached afterwards.
    const std::lock_guard<std::mutex> lock(
        encoding_[std::hash<std::string>()(*row.key) % encoding_.size()]);
    known = known_cache(row);
    if (!is_complete(known)) {
      SharedCache cache;
      if (known != nullptr) {
        cache = append(*known, row.history);
        caches_.count(&CacheCounts::appends);
      } else {
        cache = encode(row.history);
        caches_.count(&CacheCounts::misses);
      }
      caches_.keep(*row.key, cache);
      return cache;
    }
  }
  caches_.count(&CacheCounts::hits);
  return known;
}

// Returns the cache that has a row's history, or the start of it that the rest can be appended to.
SharedCache RowScorer::known_cache(const Row& row) {
  SharedCache known = caches_.find(*row.key);
  if (known == nullptr || !known->history.begins(row.history)) return nullptr;
  const int64_t more = row.history.num_events() - known->history.num_events();
  const int64_t most = ranker_.append_sizes.empty() ? 0 : ranker_.append_sizes.back();
  return more <= most ? known : nullptr;
}

SharedCache RowScorer::encode(const History& history) const {
  const size_t size = size_for(history.num_events());
  std::vector<int64_t> capacities = manifest_.batch.sizes[0].capacities[0];
  std::fill(capacities.begin() + static_cast<int64_t>(history.context.size()), capacities.end(),
            ranker_.caches[size].events);
  RowInputs inputs(capacities);
  for (const auto* features : {&history.context, &history.events}) {
    for (const Values& values : *features) {
      inputs.add(values, 0, static_cast<int64_t>(values.size()));
    }
  }
  std::vector<HostArray> arrays = inputs.arrays();
  const Buffer request(sizeof(int32_t));
  std::memcpy(request.data(), &history.request_time, sizeof(int32_t));
  if (ranker_.request_time) arrays.push_back({request.data(), DType::kInt32, {1}});
  return std::make_shared<const Cache>(
      Cache{history, size, programs_.run(RankerStep::kEncode, size, 0, {}, arrays)});
}

// Returns a cache with the events of a history that a cache of its start does not have yet.
SharedCache RowScorer::append(const Cache& known, const History& history) const {
  const int64_t start = known.history.num_events(), stop = history.num_events();
  const size_t size = std::max(known.size, size_for(stop));
  Arguments arguments = arguments_of(known.arrays);
  // A larger history size has the same arrays with more tokens, which are zeros.
  std::vector<Buffer> memory;
  RuntimeArrays grown;
  for (size_t i = 0; size > known.size && i < arguments.size(); ++i) {
    const ArraySpec& spec = ranker_.caches[size].arrays[i];
    memory.emplace_back(spec.bytes());
    std::copy_n(arguments[i]->data(), arguments[i]->bytes(), memory.back().data());
    std::vector<int64_t> shape = {1};
    shape.insert(shape.end(), spec.shape.begin(), spec.shape.end());
    grown.push_back(programs_.share({memory.back().data(), spec.dtype, std::move(shape)}));
    arguments[i] = grown.back().get();
  }
  const int64_t count = size_that_holds(ranker_.append_sizes, stop - start);
  RowInputs inputs(std::vector<int64_t>(history.events.size(), count));
  for (const Values& values : history.events) inputs.add(values, start, stop);
  return std::make_shared<const Cache>(
      Cache{history, size,
            programs_.run(RankerStep::kAppend, size, count, arguments, inputs.arrays())});
}

size_t RowScorer::size_for(int64_t events) const {
  const auto place =
      std::find_if(ranker_.caches.begin(), ranker_.caches.end(),
                   [&](const CacheSize& size) { return events <= size.events; });
  return static_cast<size_t>(place - ranker_.caches.begin());
}

}  // namespace jaxrec::serving
