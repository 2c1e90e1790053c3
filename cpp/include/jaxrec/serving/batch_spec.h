// The batches that an exported model takes; jaxrec/serve/artifact/batch_spec.py describes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "jaxrec/serving/dtype.h"

namespace jaxrec::serving {

// Nesting of leaves in dicts, lists and tuples.
struct Structure {
  enum class Kind { kLeaf, kDict, kList, kTuple };
  Kind kind = Kind::kLeaf;
  std::vector<std::string> keys;  // of a dict
  std::vector<Structure> parts;

  size_t num_leaves() const;
};

// An array with a leading batch axis: an input, or an output.
struct ArraySpec {
  std::string name;            // its place, such as "batch[0]"
  DType dtype;
  std::vector<int64_t> shape;  // of one sample

  int64_t elements() const;    // of one sample
  size_t bytes() const;        // of one sample
};

// A key of a ragged input.
struct Feature {
  std::string name;
  std::optional<int64_t> num_ids;  // ids are below it; none: no table reads the feature
  std::optional<int64_t> fixed;    // number of ids that each sample must have

  int64_t bound() const;           // ids are below it, and fit int32
};

// Ids of several features, any number for each sample.
struct RaggedSpec {
  std::string name;
  std::vector<Feature> features;
  bool is_weighted = false;
};

using InputSpec = std::variant<ArraySpec, RaggedSpec>;

const std::string& name_of(const InputSpec& input);

// A number of samples that the model is compiled for.
struct BatchSize {
  int64_t samples = 0;
  // For each ragged input, the capacity for the ids of each feature.
  std::vector<std::vector<int64_t>> capacities;
};

// The batches that the model takes.
struct BatchSpec {
  Structure structure;  // of the positional arguments
  std::vector<InputSpec> inputs;
  std::vector<BatchSize> sizes;  // ascending
};

}  // namespace jaxrec::serving
