// Checks of what a program passes to a call. XLA takes operands, results and attributes from the
// program, which may be an edited file: a call compares them with each other before it touches
// memory.
#ifndef JAXREC_CHECKS_H_
#define JAXREC_CHECKS_H_

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxrec {

namespace ffi = xla::ffi;

using Dimensions = ffi::Span<const int64_t>;

// Row numbers, positions and bags are int32.
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();

// A shape, such as [4, 8].
inline std::string shape_of(Dimensions dimensions) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < dimensions.size(); ++i) text << (i == 0 ? "" : ", ") << dimensions[i];
  text << "]";
  return text.str();
}

inline bool are_equal(Dimensions a, Dimensions b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

// The first difference between what a call gets and what it takes.
class Checks {
 public:
  // Notes a difference, in words, unless `holds`. Whether there is no difference so far.
  template <class... Words>
  bool require(bool holds, const Words&... words) {
    if (!holds && passed()) {
      std::ostringstream sentence;
      (sentence << ... << words);
      error_ = ffi::Error::InvalidArgument(sentence.str());
    }
    return passed();
  }

  // Notes an error of XLA.
  bool require(const ffi::Error& error) {
    if (error.failure() && passed()) error_ = error;
    return passed();
  }

  bool in_range(const char* name, int64_t number, int64_t least, int64_t most) {
    return require(least <= number && number <= most, "`", name, "` is ", number, ", not ", least,
                   " to ", most);
  }

  // `[n]`, of at most kMostRows.
  template <class Buffer>
  bool is_list(const char* name, const Buffer& list) {
    const Dimensions dimensions = list.dimensions();
    if (dimensions.size() == 1 && dimensions[0] <= kMostRows) return passed();
    return require(false, "`", name, "` has the shape ", shape_of(dimensions), ", not [n]");
  }

  // `[count]`, or `[0]` where the list may be missing.
  template <class Buffer>
  bool has_length(const char* name, const Buffer& list, int64_t count,
                  bool may_be_missing = false) {
    if (!is_list(name, list)) return false;
    const int64_t given = list.dimensions()[0];
    return require(given == count || (may_be_missing && given == 0), "`", name, "` has ", given,
                   " elements, not ", count);
  }

  bool passed() const { return error_.success(); }
  const ffi::Error& error() const { return error_; }

 private:
  ffi::Error error_ = ffi::Error::Success();
};

// An error of a call, which begins with the name of the call.
inline XLA_FFI_Error* with_name(const char* name, const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return nullptr;
  XLA_FFI_Error_GetMessage_Args get = {XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE, nullptr, error,
                                       nullptr};
  api->XLA_FFI_Error_GetMessage(&get);
  const std::string message = std::string(name) + " cannot run: " + get.message +
                              ". The program was edited, or made for another version of jaxrec.";
  XLA_FFI_Error_Destroy_Args destroy = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  api->XLA_FFI_Error_Destroy(&destroy);
  XLA_FFI_Error_Create_Args create = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr,
                                      message.c_str(), XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return api->XLA_FFI_Error_Create(&create);
}

}  // namespace jaxrec

#endif  // JAXREC_CHECKS_H_
