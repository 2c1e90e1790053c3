// Rows of a request to a ranker, checked against its sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "history_caches.h"
#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/request.h"

namespace jaxrec::serving {

// A user's history and candidates.
struct Row {
  std::optional<std::string> key;  // of the history's cache; none: it is not kept
  History history;
  std::vector<Values> candidates;  // of each feature of candidates; all of one size

  int64_t num_candidates() const { return static_cast<int64_t>(candidates.front().size()); }
};

// Checks the number of values of each feature; the rest of the request is checked.
//
// Throws RequestError, which names the feature and the row.
void check_rows(const RankerSpec& ranker, const BatchSpec& batch, const Request& request);

// Returns a row of a checked request.
Row row_of(const RankerSpec& ranker, const BatchSpec& batch, const Request& request,
           int64_t number);

}  // namespace jaxrec::serving
