// Requests in JSON, one a line, answered in their order.
#pragma once

#include <cstdio>
#include <memory>

#include "jaxrec/serving/batcher.h"
#include "jaxrec/serving/model.h"

namespace jaxrec::serving {

// Reads requests from `in` and writes a line for each to `out`: its scores, or {"error": ...}.
// Requests of the moment are joined to batches. Returns the number of requests that failed.
int64_t answer_lines(std::shared_ptr<const Model> model, const BatcherOptions& options,
                     std::FILE* in, std::FILE* out);

}  // namespace jaxrec::serving
