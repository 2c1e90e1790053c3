// Requests in JSON, one a line, answered in their order.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string_view>

#include "jaxrec/serving/batcher.h"

namespace jaxrec::serving {

using Decode = std::function<Request(std::string_view)>;

// Reads requests from `in` and writes a line for each to `out`: its scores, or {"error": ...}.
// Requests of the moment are joined to batches; any number of samples may wait. Returns the number
// of requests that failed.
int64_t answer_lines(std::shared_ptr<const Predictor> model, const Decode& decode,
                     BatcherOptions options, std::FILE* in, std::FILE* out);

}  // namespace jaxrec::serving
