// What a model returns for a request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "jaxrec/serving/manifest.h"

namespace jaxrec::serving {

struct Scores {
  int64_t samples = 0;
  // Elements of each output, row-major, of its type, in the order of Manifest::outputs.
  std::vector<std::vector<std::byte>> outputs;
  // [samples + 1] of each sample's first row in the outputs, for a ranker, which has a row for each
  // candidate; else empty, and each sample has one row.
  std::vector<int64_t> offsets;
};

// Returns some samples of a model's scores.
Scores slice(const Manifest& manifest, const Scores& scores, int64_t start, int64_t stop);

// Returns the outputs in JSON, columns by name (see output_columns) with an element for each sample:
// {"probability": [0.25, 0.5]}, or lists with an element for each candidate:
// {"click": [[0.25, 0.5], []]}. Numbers have as many digits as tell them apart; one that is not
// finite is null.
std::string to_json(const Manifest& manifest, const Scores& scores);

}  // namespace jaxrec::serving
