// Scores of a ranker's rows, whose histories are encoded once and kept by key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "history_caches.h"
#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/runtime.h"
#include "ranker_rows.h"

namespace jaxrec::serving {

// The programs of a ranker; several threads may run them at once.
class RankerPrograms {
 public:
  virtual ~RankerPrograms() = default;

  // Runs a step for a history size, by its index, and a count (see RankerProgram). The arguments
  // behind those of the model are `cache` and then `inputs`.
  virtual RuntimeArrays run(RankerStep step, size_t size, int64_t count, const Arguments& cache,
                            const std::vector<HostArray>& inputs) const = 0;

  // Returns an array that lies in memory of the caller, who keeps it.
  virtual std::unique_ptr<const RuntimeArray> share(const HostArray& array) const = 0;
};

// Several threads may score at once. Those that find no cache of a key encode its history once,
// while the others wait.
class RowScorer {
 public:
  // Both must outlive this. `max_bytes` bounds all caches; those of rows that are being scored come
  // on top.
  RowScorer(const Manifest& manifest, const RankerPrograms& programs, size_t max_bytes)
      : manifest_(manifest), ranker_(*manifest.ranker), programs_(programs), caches_(max_bytes) {}

  // Appends the scores of a row's candidates to each output.
  void score(const Row& row, std::vector<std::vector<std::byte>>& outputs);

  CacheCounts counts() const { return caches_.counts(); }

 private:
  SharedCache cache_of(const Row& row);
  SharedCache known_cache(const Row& row);
  SharedCache encode(const History& history) const;
  SharedCache append(const Cache& known, const History& history) const;
  size_t size_for(int64_t events) const;

  const Manifest& manifest_;
  const RankerSpec& ranker_;
  const RankerPrograms& programs_;
  HistoryCaches caches_;
  // A thread that encodes holds the one of its key.
  std::array<std::mutex, 64> encoding_;
};

}  // namespace jaxrec::serving
