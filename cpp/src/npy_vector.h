// One-dimensional arrays in npy files.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "npy.h"

namespace jaxrec::serving {

// The elements of an npy file, which must outlive this.
template <class Number>
class NpyVector {
 public:
  NpyVector() = default;

  // Throws std::invalid_argument where the file is no such array of `type`, such as "<u8".
  NpyVector(std::string_view file, std::string_view type) {
    const NpyHeader header = read_npy_header(file);
    if (header.type != type || header.shape.size() != 1) {
      throw std::invalid_argument("it is of type " + header.type + " and " +
                                  std::to_string(header.shape.size()) +
                                  " dimensions instead of " + std::string(type) + " and one");
    }
    size_ = static_cast<size_t>(header.shape[0]);
    data_ = file.data() + header.data_start;
  }

  size_t size() const { return size_; }
  const char* data() const { return data_; }

  Number operator[](size_t i) const {
    Number number;
    std::memcpy(&number, data_ + i * sizeof number, sizeof number);
    return number;
  }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace jaxrec::serving
