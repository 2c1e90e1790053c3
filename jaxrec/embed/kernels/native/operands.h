// The operands, results and attributes of calls, checked, as the primitives take them.
#ifndef JAXREC_OPERANDS_H_
#define JAXREC_OPERANDS_H_

#include <vector>

#include "checks.h"
#include "lookup.h"

namespace jaxrec {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using BagFloats = ffi::Buffer<ffi::F32, 2>;  // [bags, columns]
using Positions = ffi::Buffer<ffi::S32, 2>;  // Of them.
using Bytes = ffi::Buffer<ffi::U8>;
using Numbers = ffi::Span<const int64_t>;

inline bool is_row_type(ffi::DataType type) {
  return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16;
}

inline Type type_of(ffi::DataType type) {
  return type == ffi::F32 ? Type::kF32 : type == ffi::BF16 ? Type::kBF16 : Type::kF16;
}

// Whether each element takes a byte or more.
inline bool has_whole_bytes(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::INVALID:
    case ffi::DataType::TOKEN:
    case ffi::DataType::S1:
    case ffi::DataType::S2:
    case ffi::DataType::S4:
    case ffi::DataType::U1:
    case ffi::DataType::U2:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN: return false;
    default: return true;
  }
}

// Operands or results that are rows of one array, in one part or in equal parts.
class Parts {
 public:
  Parts(Checks& checks, const char* name) : checks_(checks), name_(name) {}

  bool add(const ffi::AnyBuffer& part) {
    const Dimensions dimensions = part.dimensions();
    const ffi::DataType type = part.element_type();
    if (dimensions.size() != 2 || dimensions[0] > kMostRows || dimensions[1] > kMaxDim) {
      return checks_.require(false, "`", name_, "` has the shape ", shape_of(dimensions),
                             ", not [rows, columns] with at most ", kMaxDim, " columns");
    }
    if (!checks_.require(is_row_type(type), "`", name_, "` is ", type, ", not F32, BF16 or F16")) {
      return false;
    }
    const bool is_first = places_.empty();
    const bool is_equal = type_of(type) == type_ && dimensions[0] == part_rows_ &&
                          dimensions[1] == dim_;
    if (!checks_.require(is_first || is_equal, "the parts of `", name_,
                         "` differ in their shapes or types")) {
      return false;
    }
    places_.push_back(part.untyped_data());
    type_ = type_of(type);
    part_rows_ = dimensions[0];
    dim_ = dimensions[1];
    return checks_.require(num_rows() <= kMostRows, "`", name_, "` has ", num_rows(),
                           " rows, more than ", kMostRows);
  }

  // The first of the remaining operands.
  bool add(ffi::RemainingArgs operands, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const auto part = operands.get<ffi::AnyBuffer>(i);
      if (!part.has_value()) return checks_.require(part.error());
      if (!add(*part)) return false;
    }
    return is_given();
  }
  // All remaining results.
  bool add(ffi::RemainingRets results) {
    for (size_t i = 0; i < results.size(); ++i) {
      auto part = results.get<ffi::AnyBuffer>(i);
      if (!part.has_value()) return checks_.require(part.error());
      if (!add(**part)) return false;
    }
    return is_given();
  }

  bool has_shape(int64_t rows, int64_t dim) const {
    return checks_.require(num_rows() == rows && dim_ == dim, "`", name_, "` has the shape [",
                           num_rows(), ", ", dim_, "], not [", rows, ", ", dim, "]");
  }
  bool has_type(Type type) const {
    return checks_.require(type_ == type, "`", name_, "` has another type of elements");
  }
  bool has_columns() const {
    return checks_.require(dim_ > 0, "`", name_, "` has no columns");
  }
  bool is_table() const {
    return checks_.require(num_rows() > 0, "`", name_, "` has no rows") && has_columns();
  }

  Rows rows() const {
    return {places_.data(), static_cast<int64_t>(places_.size()), part_rows_};
  }
  void* first_part() const { return places_[0]; }
  Type type() const { return type_; }
  int64_t num_rows() const { return part_rows_ * static_cast<int64_t>(places_.size()); }
  int64_t dim() const { return dim_; }

 private:
  bool is_given() const {
    return checks_.require(!places_.empty(), "`", name_, "` is missing");
  }

  Checks& checks_;
  const char* name_;
  std::vector<void*> places_;
  Type type_ = Type::kF32;
  int64_t part_rows_ = 0, dim_ = 0;
};

// An operand that is not given has no elements.
template <class Buffer>
auto given(Buffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

// Nine numbers a feature: BagLayout's fields in base.py, then where its bags lie in the output.
// Each fits into int32, so that their sums and products fit into int64.
inline std::vector<Feature> read_layout(Checks& checks, Numbers numbers, int64_t num_ids,
                                        int64_t num_lengths, int64_t num_rows) {
  if (!checks.require(numbers.size() % 9 == 0, "`layout` has ", numbers.size(),
                      " numbers, not nine for each feature")) {
    return {};
  }
  const int64_t num_features = static_cast<int64_t>(numbers.size()) / 9;
  std::vector<Feature> features;
  features.reserve(num_features);
  const bool is_interleaved = num_features > 0 && numbers[8] == num_features;
  int64_t position = 0, bags = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t* n = numbers.begin() + 9 * f;
    // All bits of kMostRows are ones.
    const int64_t bits = n[0] | n[1] | n[2] | n[3] | n[4] | n[5] | n[6] | n[7] | n[8];
    for (int64_t i = 0; i < 9 && (bits & ~kMostRows) != 0; ++i) {
      checks.require((n[i] & ~kMostRows) == 0, "number ", i, " of feature ", f, " in `layout` is ",
                     n[i], ", not 0 to ", kMostRows);
    }
    checks.require(n[0] + n[1] <= num_ids, "feature ", f, " in `layout` reads ids ", n[0], " to ",
                   n[0] + n[1], " of ", num_ids);
    checks.require(n[2] + n[3] <= num_lengths, "feature ", f, " in `layout` reads lengths ", n[2],
                   " to ", n[2] + n[3], " of ", num_lengths);
    checks.require(n[4] + n[5] <= num_rows, "feature ", f, " in `layout` reads rows ", n[4], " to ",
                   n[4] + n[5], " of ", num_rows);
    checks.require(n[6] <= 1, "feature ", f, " in `layout` has pooling ", n[6], ", not 0 or 1");
    const int64_t row = is_interleaved ? f : bags, step = is_interleaved ? num_features : 1;
    checks.require(n[7] == row && n[8] == step && (!is_interleaved || n[3] == numbers[3]),
                   "feature ", f, " in `layout` writes ", n[3], " rows from ", n[7],
                   " in steps of ", n[8], ", but bags of features alternate or follow each other");
    if (!checks.passed()) return {};
    // No row is asked for behind the last row of the table.
    const int64_t row_offset = n[5] == 0 ? 0 : n[4];
    features.push_back({n[0], n[1], n[2], n[3], row_offset, n[5], n[6] != 0, position, n[7], n[8]});
    position += n[1];
    bags += n[3];
  }
  return features;
}

// `weights` is null where a call takes none.
inline Batch read_batch(Checks& checks, const Ints& ids, const Ints& lengths, const Floats* weights,
                        Numbers layout, int64_t num_rows) {
  if (!checks.is_list("ids", ids) || !checks.is_list("lengths", lengths)) return {};
  const int64_t num_ids = ids.dimensions()[0];
  if (weights != nullptr) checks.has_length("weights", *weights, num_ids, true);
  return {ids.typed_data(), lengths.typed_data(), weights == nullptr ? nullptr : given(*weights),
          read_layout(checks, layout, num_ids, lengths.dimensions()[0], num_rows)};
}

// Whether the bags of a batch are the rows of an output, those of each feature in one part.
inline bool fills(Checks& checks, const Batch& batch, const Rows& out) {
  int64_t bags = 0;
  for (const Feature& feature : batch.features) bags += feature.stride;
  const int64_t num_rows = out.num_parts * out.part_rows;
  if (!checks.require(bags == num_rows, "`layout` has ", bags, " bags, the result ", num_rows,
                      " rows")) {
    return false;
  }
  for (const Feature& feature : batch.features) {
    if (out.num_parts == 1 || feature.stride == 0) continue;
    const int64_t last = feature.out_row + (feature.stride - 1) * feature.out_step;
    checks.require(feature.out_row / out.part_rows == last / out.part_rows,
                   "the bags of a feature lie in two parts of the result");
  }
  return checks.passed();
}

// Packed rows of `dim` columns.
inline PackedTable read_packed(Checks& checks, const Bytes& packed, int32_t code, int64_t dim) {
  const Dimensions dimensions = packed.dimensions();
  if (dimensions.size() != 2 || dimensions[0] > kMostRows) {
    checks.require(false, "`packed` has the shape ", shape_of(dimensions), ", not [rows, bytes]");
    return {};
  }
  const int64_t row_bytes = kernels().packed_row_bytes(static_cast<Code>(code), dim);
  checks.require(row_bytes > 0, "`code` is ", code, ", which no format of packed rows has");
  checks.require(dimensions[1] == row_bytes, "rows of `packed` have ", dimensions[1],
                 " bytes; by `code` and the result they have ", row_bytes);
  return {packed.typed_data(), static_cast<Code>(code), dimensions[0], dimensions[1], dim};
}

}  // namespace jaxrec

#endif  // JAXREC_OPERANDS_H_
