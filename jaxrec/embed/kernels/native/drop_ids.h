// Batches without the ids that stand for no value.
#ifndef JAXREC_DROP_IDS_H_
#define JAXREC_DROP_IDS_H_

#include <cstdint>
#include <vector>

#include "team.h"

namespace jaxrec {

// Where a feature lies in the arrays of a batch, and the id that is left out of its bags.
struct DroppingFeature {
  int64_t id_start, capacity, length_start, stride;
  int32_t dropped;
};

// Moves the ids of a feature that stay to the front of its segment, in order, and writes the lengths
// of the bags without the others. `sources` has the position that each id comes from. Positions behind
// a feature's last id get the dropped id and their own position; other features stay as they are.
void drop_ids(Team& team, const int32_t* ids, int64_t num_ids, const int32_t* lengths,
              int64_t num_lengths, const std::vector<DroppingFeature>& features, int32_t* new_ids,
              int32_t* new_lengths, int32_t* sources);

}  // namespace jaxrec

#endif  // JAXREC_DROP_IDS_H_
