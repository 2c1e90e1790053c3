// Encoded histories by key, of bounded bytes; those that were used longest ago are dropped first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "jaxrec/serving/cache_counts.h"
#include "jaxrec/serving/runtime.h"

namespace jaxrec::serving {

// Values of one feature of one row.
using Values = std::vector<int32_t>;

// What a row's history was encoded from: two equal ones have equal caches.
struct History {
  std::vector<Values> context;  // of each feature of context
  std::vector<Values> events;   // of each feature of events, oldest first; all of one size
  int32_t request_time = 0;     // that it is encoded for; 0 if the model needs none

  int64_t num_events() const { return static_cast<int64_t>(events.front().size()); }
  size_t bytes() const;

  // Whether another history has this context and these events, and maybe more.
  bool begins(const History& other) const;
};

// An encoded history, which nothing changes.
struct Cache {
  History history;
  size_t size = 0;       // index of its history size in RankerSpec::caches
  RuntimeArrays arrays;  // as the ranker's programs return and take them

  size_t bytes() const;  // of the history and the arrays
};

using SharedCache = std::shared_ptr<const Cache>;

// Several threads may use it at once. A cache that is dropped stays in memory until the last thread
// that scores against it lets go of it.
class HistoryCaches {
 public:
  explicit HistoryCaches(size_t max_bytes) : max_bytes_(max_bytes) {}

  // Returns the cache of a key, which then counts as used; null: there is none.
  SharedCache find(const std::string& key);

  // Keeps a cache in place of the key's old one, and drops those that were used longest ago while
  // there is no space. One that is larger than all of the space is not kept.
  void keep(const std::string& key, SharedCache cache);

  // Counts a row: `hits`, `appends` or `misses`.
  void count(int64_t CacheCounts::*kind);

  CacheCounts counts() const;

 private:
  struct Entry {
    std::string key;
    SharedCache cache;
  };
  using Entries = std::list<Entry>;

  void remove(Entries::iterator entry, std::vector<SharedCache>& dropped);

  const size_t max_bytes_;
  mutable std::mutex mutex_;
  Entries entries_;  // the last used first
  std::unordered_map<std::string, Entries::iterator> by_key_;
  CacheCounts counts_;
};

}  // namespace jaxrec::serving
