// Exported rankers that keep the encoded histories of users.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "jaxrec/serving/cache_counts.h"
#include "jaxrec/serving/predictor.h"
#include "jaxrec/serving/runtime.h"

namespace jaxrec::serving {

struct RankerOptions {
  size_t cache_bytes = size_t{1} << 30;  // of all caches; those of rows that are being scored come
                                         // on top
  bool verify = true;                    // see Model::load
};

// A ranker that `jaxrec.serve.export_ranker` wrote; several threads may predict at once.
//
// A row of a request whose key has a cache of the same context and events is scored alone. Where
// more events follow, these are appended; otherwise the history is encoded.
class Ranker : public Predictor {
 public:
  // As Model::load, for rankers.
  static std::shared_ptr<const Ranker> load(const std::filesystem::path& directory,
                                            std::shared_ptr<Runtime> runtime,
                                            const RankerOptions& options = {});
  ~Ranker() override;

  const Manifest& manifest() const override;

  // Returns a row of outputs for each candidate (see Scores::offsets).
  Scores predict(const Request& request) const override;

  // Compiles all programs; otherwise each compiles at its first use.
  void warm_up() const;

  CacheCounts cache_counts() const;

 private:
  struct State;
  explicit Ranker(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace jaxrec::serving
