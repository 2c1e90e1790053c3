#include "jaxrec/serving/scores.h"

#include <charconv>
#include <cmath>
#include <cstring>

#include "half.h"
#include "jaxrec/serving/columns.h"
#include "json_string.h"

namespace jaxrec::serving {
namespace {

template <class Number>
Number read(const std::byte* element) {
  Number number;
  std::memcpy(&number, element, sizeof number);
  return number;
}

template <class Number>
void write_number(Number number, std::string& out) {
  if constexpr (std::is_floating_point_v<Number>) {
    if (!std::isfinite(number)) {
      out += "null";
      return;
    }
  }
  char text[40];
  const auto [end, error] = std::to_chars(text, text + sizeof text, number);
  out.append(text, end);
}

void write_element(DType dtype, const std::byte* element, std::string& out) {
  switch (dtype) {
    case DType::kBool: out += read<uint8_t>(element) ? "true" : "false"; break;
    case DType::kInt8: write_number(read<int8_t>(element), out); break;
    case DType::kInt16: write_number(read<int16_t>(element), out); break;
    case DType::kInt32: write_number(read<int32_t>(element), out); break;
    case DType::kInt64: write_number(read<int64_t>(element), out); break;
    case DType::kUInt8: write_number(read<uint8_t>(element), out); break;
    case DType::kUInt16: write_number(read<uint16_t>(element), out); break;
    case DType::kUInt32: write_number(read<uint32_t>(element), out); break;
    case DType::kUInt64: write_number(read<uint64_t>(element), out); break;
    case DType::kFloat16: write_number(from_float16(read<uint16_t>(element)), out); break;
    case DType::kBFloat16: write_number(from_bfloat16(read<uint16_t>(element)), out); break;
    case DType::kFloat64: write_number(read<double>(element), out); break;
    default: write_number(read<float>(element), out); break;
  }
}

// Writes an array from some axis on, and returns the element after it.
const std::byte* write_array(const std::vector<int64_t>& shape, size_t axis, DType dtype,
                             const std::byte* element, std::string& out) {
  if (axis == shape.size()) {
    write_element(dtype, element, out);
    return element + size_of(dtype);
  }
  out += '[';
  for (int64_t i = 0; i < shape[axis]; ++i) {
    if (i > 0) out += ',';
    element = write_array(shape, axis + 1, dtype, element, out);
  }
  out += ']';
  return element;
}

}  // namespace

Scores slice(const Manifest& manifest, const Scores& scores, int64_t start, int64_t stop) {
  Scores part;
  part.samples = stop - start;
  int64_t first = start, last = stop;  // rows
  if (!scores.offsets.empty()) {
    first = scores.offsets[static_cast<size_t>(start)];
    last = scores.offsets[static_cast<size_t>(stop)];
    for (int64_t sample = start; sample <= stop; ++sample) {
      part.offsets.push_back(scores.offsets[static_cast<size_t>(sample)] - first);
    }
  }
  for (size_t i = 0; i < manifest.outputs.size(); ++i) {
    const auto bytes = static_cast<int64_t>(manifest.outputs[i].bytes());
    const std::byte* values = scores.outputs[i].data();
    part.outputs.emplace_back(values + first * bytes, values + last * bytes);
  }
  return part;
}

std::string to_json(const Manifest& manifest, const Scores& scores) {
  const ColumnNames names = output_columns(manifest);
  std::string out = "{";
  for (size_t i = 0; i < manifest.outputs.size(); ++i) {
    const ArraySpec& output = manifest.outputs[i];
    std::vector<int64_t> shape = {scores.samples};
    shape.insert(shape.end(), output.shape.begin(), output.shape.end());
    out += (i == 0 ? "" : ",") + json_string(names[i]) + ":";
    const std::byte* element = scores.outputs[i].data();
    if (scores.offsets.empty()) {
      write_array(shape, 0, output.dtype, element, out);
      continue;
    }
    out += '[';
    for (size_t sample = 0; sample + 1 < scores.offsets.size(); ++sample) {
      if (sample > 0) out += ',';
      shape[0] = scores.offsets[sample + 1] - scores.offsets[sample];
      element = write_array(shape, 0, output.dtype, element, out);
    }
    out += ']';
  }
  return out + "}";
}

}  // namespace jaxrec::serving
