// The part of a manifest that describes raw columns.
#pragma once

#include "jaxrec/serving/column_encoding.h"
#include "json.h"

namespace jaxrec::serving {

// Throws std::invalid_argument where a value is not what `jaxrec export` wrote.
ColumnEncoding read_column_encoding(const Json& value);

}  // namespace jaxrec::serving
