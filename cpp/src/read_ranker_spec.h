// Reads what a manifest says of a ranker, and checks it.
#pragma once

#include "jaxrec/serving/ranker_spec.h"
#include "json.h"

namespace jaxrec::serving {

// Throws std::invalid_argument where it is not one that this version knows, or contradicts the
// batch.
RankerSpec read_ranker_spec(const Json& value, const BatchSpec& batch);

}  // namespace jaxrec::serving
