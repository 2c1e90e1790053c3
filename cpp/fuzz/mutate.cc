#include "mutate.h"

#include <array>
#include <cctype>

namespace jaxrec::serving {
namespace {

constexpr std::array<const char*, 44> kTokens = {
    "0",       "1",        "-1",   "2147483647", "2147483648", "-2147483649", "4294967296",
    "1e999",   "1e-400",   "0.5",  "-0.0",       "9223372036854775807",       "9223372036854775808",
    "18446744073709551615",        "18446744073709551616",     "-9223372036854775808",
    "null",    "true",     "false", "{}",        "[]",         "[[]]",        "\"\"",
    "\"a\"",   "[",        "]",    "{",          "}",          ",",           ":",
    "\"",      "\\",       "\\u0000", "\\ud800", "\xff",       "\xc3\xa9",    "\"../x\"",
    "\"/etc/passwd\"",     "NaN",  "Infinity",   "'",          "(",           ")",
    "-"};

class Mutation {
 public:
  Mutation(std::string text, const std::vector<std::string>& seeds, std::mt19937_64& random)
      : text_(std::move(text)), seeds_(seeds), random_(random) {}

  void apply() {
    switch (below(8)) {
      case 0:
        if (!text_.empty()) text_[below(text_.size())] ^= static_cast<char>(1u << below(8));
        break;
      case 1: text_.erase(place(), below(below(4) == 0 ? 200 : 8)); break;
      case 2: text_.insert(place(), kTokens[below(kTokens.size())]); break;
      case 3: replace_number(); break;
      case 4: text_.insert(place(), part(text_)); break;
      case 5: text_.insert(place(), part(seeds_[below(seeds_.size())])); break;
      case 6: text_.insert(place(), 1, static_cast<char>(below(256))); break;
      default: replace_word(); break;
    }
  }

  std::string text() && { return std::move(text_); }

 private:
  size_t below(size_t bound) { return static_cast<size_t>(random_() % bound); }
  size_t place() { return below(text_.size() + 1); }

  std::string part(const std::string& text) {
    if (text.empty()) return text;
    const size_t start = below(text.size());
    return text.substr(start, 1 + below(64));
  }

  // Puts a token in the place of the next number.
  void replace_number() {
    const size_t start = text_.find_first_of("0123456789", place());
    if (start == std::string::npos) return;
    size_t end = start;
    while (end < text_.size() && std::isdigit(static_cast<unsigned char>(text_[end]))) ++end;
    text_.replace(start, end - start, kTokens[below(kTokens.size())]);
  }

  // Puts a token in the place of the next value between commas and brackets.
  void replace_word() {
    const size_t start = text_.find_first_of(":,[", place());
    if (start == std::string::npos) return;
    const size_t end = text_.find_first_of(",]}", start + 1);
    if (end == std::string::npos) return;
    text_.replace(start + 1, end - start - 1, kTokens[below(kTokens.size())]);
  }

  std::string text_;
  const std::vector<std::string>& seeds_;
  std::mt19937_64& random_;
};

}  // namespace

std::string mutate(const std::string& text, const std::vector<std::string>& seeds,
                   std::mt19937_64& random) {
  Mutation mutation(text, seeds, random);
  // One change often leaves a text that is taken.
  const auto changes = random() % 2 == 0 ? 1 : 1 + random() % 8;
  for (auto left = changes; left > 0; --left) mutation.apply();
  return std::move(mutation).text();
}

}  // namespace jaxrec::serving
