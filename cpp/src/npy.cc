#include "npy.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "jaxrec/serving/error.h"

namespace jaxrec::serving {
namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";

// Returns the text after a key of the header, a Python dict such as
// "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }".
std::string_view after(std::string_view header, std::string_view key) {
  const size_t found = header.find(key);
  if (found == std::string_view::npos) throw std::invalid_argument("its header is damaged");
  return header.substr(found + key.size());
}

std::string_view until(std::string_view text, char end) {
  const size_t found = text.find(end);
  if (found == std::string_view::npos) throw std::invalid_argument("its header is damaged");
  return text.substr(0, found);
}

std::vector<int64_t> read_shape(std::string_view text) {
  std::vector<int64_t> shape;
  while (!text.empty()) {
    if (text[0] == ' ' || text[0] == ',') {
      text.remove_prefix(1);
      continue;
    }
    int64_t size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    if (error != std::errc() || size < 0) throw std::invalid_argument("its shape is damaged");
    shape.push_back(size);
    text.remove_prefix(static_cast<size_t>(end - text.data()));
  }
  return shape;
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const auto fail = [&] {
    return ArtifactError(path.string() + " cannot be read: " + std::strerror(errno));
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw fail();
  struct stat status;
  if (::fstat(file, &status) != 0) {
    const ArtifactError error = fail();
    ::close(file);
    throw error;
  }
  if (status.st_size == 0) {
    ::close(file);
    throw ArtifactError(path.string() + " is empty");
  }
  size_ = static_cast<size_t>(status.st_size);
  data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  const ArtifactError error = fail();
  ::close(file);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw error;
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

NpyHeader read_npy_header(std::string_view file) {
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<unsigned char>(file[i])); };
  if (file.size() < 12 || file.substr(0, kNpyMagic.size()) != kNpyMagic) {
    throw std::invalid_argument("it is not an npy file");
  }
  const size_t version = byte(6);
  if (version < 1 || version > 3) throw std::invalid_argument("its version of npy is not known");
  const size_t start = version == 1 ? 10 : 12;
  size_t length = byte(8) | byte(9) << 8;
  if (version > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (length > file.size() - start) throw std::invalid_argument("it is cut short");
  const std::string_view text = file.substr(start, length);
  NpyHeader header;
  header.type = until(after(text, "'descr': '"), '\'');
  if (after(text, "'fortran_order': ").substr(0, 5) != "False") {
    throw std::invalid_argument("its array is not in C order");
  }
  header.shape = read_shape(until(after(text, "'shape': ("), ')'));
  header.data_start = start + length;
  size_t left = file.size() - header.data_start;
  size_t item = 0;
  const std::string_view digits = std::string_view(header.type).substr(std::min<size_t>(2, header.type.size()));
  std::from_chars(digits.data(), digits.data() + digits.size(), item);
  if (item == 0) throw std::invalid_argument("its type is damaged");
  left /= item;
  size_t elements = 1;
  for (const int64_t size : header.shape) {
    if (size == 0) return header;
  }
  for (const int64_t size : header.shape) {
    if (static_cast<uint64_t>(size) > left / elements) throw std::invalid_argument("it is cut short");
    elements *= static_cast<size_t>(size);
  }
  return header;
}

}  // namespace jaxrec::serving
