#include "history_caches.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace jaxrec::serving {
namespace {

size_t bytes_of(const std::vector<Values>& features) {
  size_t bytes = 0;
  for (const Values& values : features) bytes += values.size() * sizeof(int32_t);
  return bytes;
}

bool begins_with(const Values& values, const Values& start) {
  return start.size() <= values.size() && std::equal(start.begin(), start.end(), values.begin());
}

}  // namespace

size_t History::bytes() const { return bytes_of(context) + bytes_of(events); }

bool History::begins(const History& other) const {
  return request_time == other.request_time && context == other.context &&
         std::equal(events.begin(), events.end(), other.events.begin(), other.events.end(),
                    [](const Values& start, const Values& all) { return begins_with(all, start); });
}

size_t Cache::bytes() const {
  size_t bytes = history.bytes();
  for (const auto& array : arrays) bytes += array->bytes();
  return bytes;
}

SharedCache HistoryCaches::find(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto place = by_key_.find(key);
  if (place == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, place->second);
  return place->second->cache;
}

void HistoryCaches::keep(const std::string& key, SharedCache cache) {
  const size_t bytes = key.size() + cache->bytes();
  // Freed after the lock: a cache has megabytes.
  std::vector<SharedCache> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  // The old one first, which is worth nothing any more, also if the new one is too large.
  if (const auto place = by_key_.find(key); place != by_key_.end()) remove(place->second, dropped);
  if (bytes > max_bytes_) return;
  while (static_cast<size_t>(counts_.bytes) > max_bytes_ - bytes) {
    remove(std::prev(entries_.end()), dropped);
    ++counts_.evictions;
  }
  entries_.push_front({key, std::move(cache)});
  by_key_.emplace(key, entries_.begin());
  counts_.bytes += static_cast<int64_t>(bytes);
  ++counts_.caches;
}

void HistoryCaches::count(int64_t CacheCounts::*kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(counts_.*kind);
}

CacheCounts HistoryCaches::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

void HistoryCaches::remove(Entries::iterator entry, std::vector<SharedCache>& dropped) {
  counts_.bytes -= static_cast<int64_t>(entry->key.size() + entry->cache->bytes());
  --counts_.caches;
  by_key_.erase(entry->key);
  dropped.push_back(std::move(entry->cache));
  entries_.erase(entry);
}

}  // namespace jaxrec::serving
