// Types of the elements of arrays, by the names that NumPy and JAX give them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace jaxrec::serving {

enum class DType {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kFloat8E4M3FN,
  kFloat8E5M2,
};

// The type of a name such as "float32"; nothing for a type that is not served.
std::optional<DType> dtype_of(std::string_view name);

std::string_view name_of(DType dtype);

// Bytes of an element.
size_t size_of(DType dtype);

// The type of an npy file that holds such elements, such as "<f4". Types that NumPy lacks are stored
// as unsigned integers.
std::string_view npy_type(DType dtype);

bool is_floating(DType dtype);

}  // namespace jaxrec::serving
