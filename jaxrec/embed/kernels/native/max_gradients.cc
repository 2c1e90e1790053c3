#include "max_gradients.h"

#include <algorithm>

namespace jaxrec {
namespace {

constexpr int64_t kElements = 1 << 14;  // Of a piece of work.

typedef int32_t __attribute__((may_alias)) FloatBits;

// Copies the elements of which `own` is the winner, and writes zeros for the others.
void copy_won(const int32_t* winner, int32_t own, const float* gradient, int64_t dim, float* to) {
  // With masks of bits, since compilers make branches of a choice between floats.
  const FloatBits* from = reinterpret_cast<const FloatBits*>(gradient);
  FloatBits* __restrict out = reinterpret_cast<FloatBits*>(to);
  for (int64_t column = 0; column < dim; ++column) {
    out[column] = from[column] & -static_cast<int32_t>(winner[column] == own);
  }
}

}  // namespace

void max_gradients(Team& team, const int32_t* winners, const float* gradients, int64_t num_bags,
                   int64_t dim, const int32_t* bags, float* out, int64_t num_lookups) {
  const int64_t size = std::max<int64_t>(1, kElements / std::max<int64_t>(1, dim));
  team.run((num_lookups + size - 1) / size, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * size, num_lookups);
    for (int64_t i = piece * size; i < end; ++i) {
      float* to = out + i * dim;
      const int64_t bag = bags[i];
      if (bag < 0 || bag >= num_bags) {
        std::fill(to, to + dim, 0.0f);
        continue;
      }
      // The lookups of a bag follow each other, so its winners are in the first-level cache. Each line
      // of the result is written once: scattering the gradients to zeros would read it again.
      const int64_t start = bag * dim;
      copy_won(winners + start, static_cast<int32_t>(i), gradients + start, dim, to);
    }
  });
}

}  // namespace jaxrec
