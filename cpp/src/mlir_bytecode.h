// Parts of a file in MLIR's format of bytecode: its strings, operations and attributes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jaxrec::serving {

// Reads numbers and bytes one after another. Throws std::invalid_argument where there are no more.
class BytecodeReader {
 public:
  explicit BytecodeReader(std::string_view bytes) : bytes_(bytes) {}

  bool is_at_end() const { return at_ == bytes_.size(); }
  size_t position() const { return at_; }

  uint8_t byte();
  uint64_t number();                     // of variable width
  size_t index(size_t size);             // a number below `size`
  std::string_view bytes(uint64_t size);

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

struct Operation {
  std::string_view dialect;
  std::string_view name;
};

// An attribute that its dialect encoded.
struct Attribute {
  std::string_view dialect;
  std::string_view content;
};

struct Bytecode {
  std::vector<std::string_view> strings;
  std::vector<Operation> operations;  // those that occur, once each
  std::vector<Attribute> attributes;
  std::vector<std::string_view> properties;

  // Throws std::invalid_argument where the text is something else, or has attributes or operations
  // in forms that StableHLO's artifacts do not have.
  explicit Bytecode(std::string_view bytes);

 private:
  // Numbers of the sections that are read.
  enum Section { kStrings = 0, kDialects = 1, kAttributes = 2, kOffsets = 3, kProperties = 8 };
  static constexpr size_t kSections = 9;

  void read_strings(BytecodeReader reader);
  std::vector<std::string_view> read_dialects(BytecodeReader reader);
  void read_attributes(BytecodeReader offsets, std::string_view contents,
                       const std::vector<std::string_view>& dialects);
  void read_properties(BytecodeReader reader);
};

}  // namespace jaxrec::serving
