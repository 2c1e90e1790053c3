#include "shift.h"

#include <algorithm>
#include <vector>

namespace jaxrec {
namespace {

constexpr int64_t kStretch = 8192;

// The last of the starts that is at most `row`: a search without branches to guess, so that those of
// several rows overlap.
int64_t find(const int32_t* starts, int64_t count, int32_t row) {
  const int32_t* base = starts;
  while (count > 1) {
    const int64_t half = count / 2;
    base = base[half] <= row ? base + half : base;
    count -= half;
  }
  return base - starts;
}

}  // namespace

void shift_rows(Team& team, const int32_t* rows, int64_t count, const int64_t* starts,
                const int64_t* shifts, int64_t num_stretches, int64_t num_rows, int32_t outside,
                int32_t* out) {
  // Half as wide, the numbers of a few thousand stretches stay in the first-level cache.
  const std::vector<int32_t> begins(starts, starts + num_stretches);
  const std::vector<int32_t> added(shifts, shifts + num_stretches);
  team.run((count + kStretch - 1) / kStretch, [&](int64_t s) {
    const int64_t end = std::min((s + 1) * kStretch, count);
    for (int64_t i = s * kStretch; i < end; ++i) {
      const bool inside = rows[i] >= 0 && rows[i] < num_rows;
      const int32_t row = inside ? rows[i] : 0;
      const int64_t stretch = find(begins.data(), num_stretches, row);
      out[i] = inside ? row + added[stretch] : outside;
    }
  });
}

}  // namespace jaxrec
