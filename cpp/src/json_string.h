// Strings in JSON.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace jaxrec::serving {

// Returns a string of UTF-8 in quotes.
inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace jaxrec::serving
