#include "jaxrec/serving/dtype.h"

#include <array>

namespace jaxrec::serving {
namespace {

struct Description {
  DType dtype;
  std::string_view name;
  size_t size;
  std::string_view npy;
  bool is_floating;
};

// In the order of DType.
constexpr std::array<Description, 15> kTypes = {{
    {DType::kBool, "bool", 1, "|b1", false},
    {DType::kInt8, "int8", 1, "|i1", false},
    {DType::kInt16, "int16", 2, "<i2", false},
    {DType::kInt32, "int32", 4, "<i4", false},
    {DType::kInt64, "int64", 8, "<i8", false},
    {DType::kUInt8, "uint8", 1, "|u1", false},
    {DType::kUInt16, "uint16", 2, "<u2", false},
    {DType::kUInt32, "uint32", 4, "<u4", false},
    {DType::kUInt64, "uint64", 8, "<u8", false},
    {DType::kFloat16, "float16", 2, "<f2", true},
    {DType::kBFloat16, "bfloat16", 2, "<u2", true},
    {DType::kFloat32, "float32", 4, "<f4", true},
    {DType::kFloat64, "float64", 8, "<f8", true},
    {DType::kFloat8E4M3FN, "float8_e4m3fn", 1, "|u1", true},
    {DType::kFloat8E5M2, "float8_e5m2", 1, "|u1", true},
}};

const Description& describe(DType dtype) { return kTypes[static_cast<size_t>(dtype)]; }

}  // namespace

std::optional<DType> dtype_of(std::string_view name) {
  for (const Description& each : kTypes) {
    if (each.name == name) return each.dtype;
  }
  return std::nullopt;
}

std::string_view name_of(DType dtype) { return describe(dtype).name; }
size_t size_of(DType dtype) { return describe(dtype).size; }
std::string_view npy_type(DType dtype) { return describe(dtype).npy; }
bool is_floating(DType dtype) { return describe(dtype).is_floating; }

}  // namespace jaxrec::serving
