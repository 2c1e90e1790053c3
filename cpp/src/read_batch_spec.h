// Reads what a manifest says of batches and arrays, and checks it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "jaxrec/serving/batch_spec.h"
#include "json.h"

namespace jaxrec::serving {

// All functions throw std::invalid_argument where a description is not one that this version knows.

// Checks that a shape has no more elements than an array may.
void check_size(const std::vector<int64_t>& shape, const std::string& name);

// Reads the field "dtype".
DType read_dtype(Fields& fields);

// Reads the nesting of inputs or outputs; messages begin with `place`.
Structure read_structure(const Json& value, const std::string& place);

// Reads an input or an output; the object may have more fields.
ArraySpec read_array(Fields& fields);

BatchSpec read_batch(const Json& value);

}  // namespace jaxrec::serving
