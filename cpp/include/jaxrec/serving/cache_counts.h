// What happened to the caches of a ranker's histories, and how large they are.
#pragma once

#include <cstdint>
#include <string>

namespace jaxrec::serving {

struct CacheCounts {
  int64_t hits = 0;       // rows whose history was cached
  int64_t appends = 0;    // rows of whose history the first events were cached
  int64_t misses = 0;     // rows whose history was encoded
  int64_t evictions = 0;  // caches that were dropped for others
  int64_t caches = 0;
  int64_t bytes = 0;      // of the caches and their keys
};

// Returns the counts in Prometheus' text format, by the names of `jaxrec serve`, such as
// jaxrec_history_cache_hits_total.
std::string to_metrics(const CacheCounts& counts);

}  // namespace jaxrec::serving
