#include "drop_ids.h"

#include <algorithm>
#include <numeric>

namespace jaxrec {
namespace {

constexpr int64_t kFew = 4096;  // Ids that one thread moves in less time than it takes to wake another.

}  // namespace

void drop_ids(Team& team, const int32_t* ids, int64_t num_ids, const int32_t* lengths,
              int64_t num_lengths, const std::vector<DroppingFeature>& features, int32_t* new_ids,
              int32_t* new_lengths, int32_t* sources) {
  std::copy(ids, ids + num_ids, new_ids);
  std::copy(lengths, lengths + num_lengths, new_lengths);
  std::iota(sources, sources + num_ids, 0);
  team.run(static_cast<int64_t>(features.size()), [&](int64_t f) {
    const DroppingFeature& feature = features[f];
    const int32_t* from = ids + feature.id_start;
    int32_t* to = new_ids + feature.id_start;
    int32_t* source = sources + feature.id_start;
    int64_t position = 0, kept = 0;
    for (int64_t bag = feature.length_start; bag < feature.length_start + feature.stride; ++bag) {
      const int64_t length = std::max(lengths[bag], 0);
      const int64_t end = std::min(position + length, feature.capacity), first = kept;
      // Written in any case, and overwritten by the next one if the id is dropped: without a branch
      // to guess.
      for (; position < end; ++position) {
        to[kept] = from[position];
        source[kept] = static_cast<int32_t>(feature.id_start + position);
        kept += from[position] != feature.dropped;
      }
      new_lengths[bag] = static_cast<int32_t>(kept - first);
    }
    for (int64_t i = kept; i < feature.capacity; ++i) {
      to[i] = feature.dropped;
      source[i] = static_cast<int32_t>(feature.id_start + i);
    }
  }, num_ids <= kFew);
}

}  // namespace jaxrec
