#include "max_gradients.h"

#include <algorithm>

namespace jaxrec {
namespace {

constexpr int64_t kElements = 1 << 14;  // Of a piece of work.

}  // namespace

void max_gradients(Team& team, const int32_t* winners, const float* gradients, int64_t num_bags,
                   int64_t dim, float* out, int64_t num_lookups) {
  const int64_t size = num_lookups * dim, count = num_bags * dim;
  team.run((size + kElements - 1) / kElements, [&](int64_t piece) {
    std::fill(out + piece * kElements, out + std::min((piece + 1) * kElements, size), 0.0f);
  });
  const int64_t bags = std::max<int64_t>(1, kElements / std::max<int64_t>(1, dim));
  if (count == 0) return;
  team.run((num_bags + bags - 1) / bags, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * bags, num_bags);
    for (int64_t bag = piece * bags; bag < end; ++bag) {
      const int32_t* of_bag = winners + bag * dim;
      const float* gradient = gradients + bag * dim;
      for (int64_t column = 0; column < dim; ++column) {
        const int64_t winner = of_bag[column];
        if (winner < 0 || winner >= num_lookups) continue;
        out[winner * dim + column] = gradient[column];
      }
    }
  });
}

}  // namespace jaxrec
