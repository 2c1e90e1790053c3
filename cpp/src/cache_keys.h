// Keys of a ranker's caches in a request.
#pragma once

#include "jaxrec/serving/request.h"
#include "json_columns.h"

namespace jaxrec::serving {

// Reads the column "cache_key": the id of each sample's user, text or an integer, or null.
//
// Throws RequestError.
CacheKeys read_cache_keys(const Json& columns, SampleCount& count);

}  // namespace jaxrec::serving
