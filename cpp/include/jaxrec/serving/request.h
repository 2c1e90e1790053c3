// A batch of any number of samples, as a client asks for its scores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "jaxrec/serving/manifest.h"

namespace jaxrec::serving {

// Elements of an array input, row-major, of the input's type.
using ArrayValues = std::vector<std::byte>;

// Ids of one feature.
struct Column {
  std::vector<int64_t> ids;
  std::vector<int64_t> offsets = {0};  // [samples + 1] of each sample's first id
  std::vector<float> weights;          // of each id, where the input is weighted
};

// Key of the cache of each sample's history, usually the id of a user; none: it is not kept.
using CacheKeys = std::vector<std::optional<std::string>>;

struct Request {
  int64_t samples = 0;
  // In the order of BatchSpec::inputs, the features in the order of RaggedSpec::features.
  std::vector<std::variant<ArrayValues, std::vector<Column>>> inputs;
  CacheKeys cache_keys;  // of requests to a ranker
};

// Reads a request in JSON, columns by name with an element for each sample:
//
//     {"input0": [[0.5, 1.0], [2.0, 0.1]], "user": [[3], []], "tags": [[1, 2], [7]]}
//
// input_columns says which names there are. A request to a ranker has the column "cache_key", too:
// the id of each sample's user, text or an integer, or null. Other columns are ignored, as
// `jaxrec serve` does.
//
// Throws RequestError, which names the column or the feature, the sample and the number.
Request decode_request(const Manifest& manifest, std::string_view json);

// Checks that a request is one that the model takes; decode_request does.
//
// Throws RequestError where sizes differ, an id is outside of its table, a sample has more ids than
// a batch holds, or another number than each sample must have.
void check_request(const Manifest& manifest, const Request& request);

// Returns the samples of several checked requests, in order.
Request join(const BatchSpec& spec, const std::vector<const Request*>& requests);

// Returns some samples of a checked request.
Request slice(const BatchSpec& spec, const Request& request, int64_t start, int64_t stop);

}  // namespace jaxrec::serving
