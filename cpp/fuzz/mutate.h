// Random changes of bytes, of numbers and of tokens of JSON.
#pragma once

#include <random>
#include <string>
#include <vector>

namespace jaxrec::serving {

// Returns a text with one to eight changes; parts of other `seeds` may get into it.
std::string mutate(const std::string& text, const std::vector<std::string>& seeds,
                   std::mt19937_64& random);

}  // namespace jaxrec::serving
