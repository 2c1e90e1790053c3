#include "mlir_bytecode.h"

#include <optional>
#include <stdexcept>

namespace jaxrec::serving {
namespace {

using Problem = std::invalid_argument;

constexpr std::string_view kBytecodeMagic = "ML\xefR";
// Properties of operations have their own section from version 5 on.
constexpr uint64_t kFirstVersion = 5, kLastVersion = 6;
constexpr uint8_t kIsAligned = 0x80, kPadding = 0xCB;

}  // namespace

uint8_t BytecodeReader::byte() {
  if (at_ >= bytes_.size()) throw Problem("it is cut short");
  return static_cast<uint8_t>(bytes_[at_++]);
}

// The number of zero bits at the low end of the first byte is that of the bytes that follow.
uint64_t BytecodeReader::number() {
  const uint8_t first = byte();
  int more = 0;
  while (more < 8 && !(first >> more & 1)) ++more;
  uint64_t rest = 0;
  for (int i = 0; i < more; ++i) rest |= static_cast<uint64_t>(byte()) << (8 * i);
  if (more == 8) return rest;
  return rest << (7 - more) | static_cast<uint64_t>(first >> (more + 1));
}

size_t BytecodeReader::index(size_t size) {
  const uint64_t index = number();
  if (index >= size) throw Problem("it has an index beyond its end");
  return static_cast<size_t>(index);
}

std::string_view BytecodeReader::bytes(uint64_t size) {
  if (size > bytes_.size() - at_) throw Problem("it is cut short");
  at_ += static_cast<size_t>(size);
  return bytes_.substr(at_ - static_cast<size_t>(size), static_cast<size_t>(size));
}

Bytecode::Bytecode(std::string_view bytes) {
  if (bytes.substr(0, kBytecodeMagic.size()) != kBytecodeMagic) throw Problem("it is not MLIR bytecode");
  BytecodeReader reader(bytes);
  reader.bytes(kBytecodeMagic.size());
  const uint64_t version = reader.number();
  if (version < kFirstVersion || version > kLastVersion) {
    throw Problem("it is MLIR bytecode of version " + std::to_string(version) +
                  ", which this library does not read");
  }
  while (reader.byte() != 0) {  // the name of the producer
  }
  std::array<std::optional<std::string_view>, kSections> sections;
  while (!reader.is_at_end()) {
    const uint8_t head = reader.byte();
    const size_t section = head & ~kIsAligned;
    const uint64_t size = reader.number();
    if (head & kIsAligned) {
      const uint64_t alignment = reader.number();
      if (alignment == 0 || (alignment & (alignment - 1)) != 0) throw Problem("it is damaged");
      while (reader.position() % alignment != 0) {
        if (reader.byte() != kPadding) throw Problem("it is damaged");
      }
    }
    if (section >= kSections || sections[section]) throw Problem("it has other sections");
    sections[section] = reader.bytes(size);
  }
  const auto of = [&](Section section) {
    if (!sections[section]) throw Problem("it lacks a section");
    return BytecodeReader(*sections[section]);
  };
  read_strings(of(kStrings));
  const std::vector<std::string_view> dialects = read_dialects(of(kDialects));
  of(kAttributes);
  read_attributes(of(kOffsets), *sections[kAttributes], dialects);
  if (sections[kProperties]) read_properties(of(kProperties));
}

// The number of strings, their sizes with a zero at the end, the last one's first, and the strings.
void Bytecode::read_strings(BytecodeReader reader) {
  std::vector<uint64_t> sizes;
  const uint64_t count = reader.number();
  for (uint64_t i = 0; i < count; ++i) sizes.push_back(reader.number());
  for (size_t i = sizes.size(); i-- > 0;) {
    const std::string_view text = reader.bytes(sizes[i]);
    if (text.empty() || text.back() != 0) throw Problem("it has a string without an end");
    strings.push_back(text.substr(0, text.size() - 1));
  }
  if (!reader.is_at_end()) throw Problem("it has more than its strings");
}

// The dialects' names, each with a section if the dialect has a version; then their operations.
std::vector<std::string_view> Bytecode::read_dialects(BytecodeReader reader) {
  const auto named = [&](uint64_t number) {
    if (number >> 1 >= strings.size()) throw Problem("it has an index beyond its end");
    return strings[number >> 1];
  };
  std::vector<std::string_view> dialects;
  for (uint64_t left = reader.number(); left > 0; --left) {
    const uint64_t number = reader.number();
    dialects.push_back(named(number));
    if (number & 1) {
      if (reader.byte() & kIsAligned) throw Problem("it is damaged");
      reader.bytes(reader.number());
    }
  }
  reader.number();  // of all operations
  while (!reader.is_at_end()) {
    const std::string_view dialect = dialects[reader.index(dialects.size())];
    for (uint64_t left = reader.number(); left > 0; --left) {
      const uint64_t number = reader.number();
      // Those of a dialect that did not know them keep their attributes in another form.
      if (!(number & 1)) throw Problem("it has operations that are not registered");
      operations.push_back({dialect, named(number)});
    }
  }
  return dialects;
}

// The sizes of attributes and types, by dialect; a bit of each says whether the dialect encoded it.
void Bytecode::read_attributes(BytecodeReader offsets, std::string_view contents,
                               const std::vector<std::string_view>& dialects) {
  BytecodeReader reader(contents);
  const uint64_t num_attributes = offsets.number(), num_types = offsets.number();
  for (const uint64_t end : {num_attributes, num_types}) {
    for (uint64_t count = 0; count < end;) {
      const std::string_view dialect = dialects[offsets.index(dialects.size())];
      for (uint64_t left = offsets.number(); left > 0; --left, ++count) {
        if (count >= end) throw Problem("it has more attributes than it says");
        const uint64_t number = offsets.number();
        if (!(number & 1)) throw Problem("it has attributes as text");
        const std::string_view content = reader.bytes(number >> 1);
        if (attributes.size() < num_attributes) attributes.push_back({dialect, content});
      }
    }
  }
  if (!offsets.is_at_end() || !reader.is_at_end()) throw Problem("it has more than its attributes");
}

void Bytecode::read_properties(BytecodeReader reader) {
  for (uint64_t left = reader.number(); left > 0; --left) {
    properties.push_back(reader.bytes(reader.number()));
  }
  if (!reader.is_at_end()) throw Problem("it has more than its properties");
}

}  // namespace jaxrec::serving
