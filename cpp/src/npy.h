// npy files, mapped into memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace jaxrec::serving {

// A file of at least one byte, mapped into memory for reading.
class MappedFile {
 public:
  // Throws ArtifactError where the file cannot be mapped.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile& operator=(MappedFile&&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

struct NpyHeader {
  std::string type;  // such as "<f4"
  std::vector<int64_t> shape;
  size_t data_start;  // of the first element in the file
};

// Reads the header of an npy file in C order.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
//
// Throws std::invalid_argument where there is none, or the file has too few bytes for the array.
NpyHeader read_npy_header(std::string_view file);

}  // namespace jaxrec::serving
