// Stable hashes of strings and integers, those of jaxrec.ragged.hash_ids.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

// The header has the whole of the library; nothing is linked.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace jaxrec::serving {

inline uint64_t hash_of(std::string_view text, uint64_t seed) {
  return XXH64(text.data(), text.size(), seed);
}

// An integer is hashed as its two's complement, the lowest byte first.
inline uint64_t hash_of(uint64_t id, uint64_t seed) {
  std::array<unsigned char, 8> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(id >> (8 * i));
  return XXH64(bytes.data(), bytes.size(), seed);
}

}  // namespace jaxrec::serving
