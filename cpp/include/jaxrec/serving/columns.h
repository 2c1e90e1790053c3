// The columns of requests and of answers by name, those of `jaxrec serve` for a model without an
// encoder.
#pragma once

#include <string>
#include <vector>

#include "jaxrec/serving/manifest.h"

namespace jaxrec::serving {

// The columns of one input: its own, or one for each of its features.
using ColumnNames = std::vector<std::string>;

// A feature has its own name, and its weights NAME.weights. An array has the last key of its place,
// such as "bias" for batch[0]['bias'], or "input0" for batch[0]. Where two columns would have one
// name, their place is part of it.
std::vector<ColumnNames> input_columns(const BatchSpec& spec);

// An output has the keys of its place, such as "a.0" for output['a'][0]; the only one is "score".
ColumnNames output_columns(const Manifest& manifest);

}  // namespace jaxrec::serving
