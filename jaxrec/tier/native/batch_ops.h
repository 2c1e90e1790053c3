// Functions of whole batches of ids, slots or keys.
#ifndef JAXREC_TIER_BATCH_OPS_H_
#define JAXREC_TIER_BATCH_OPS_H_

#include <cstdint>

namespace jaxrec {

// Writes the distinct ids in the order of their first occurrence, how often each occurs, and for
// each id its position among the distinct ones. Returns their number. `seed` as of IdMap.
int64_t distinct(const int64_t* ids, int64_t count, uint64_t seed, int64_t* unique,
                 int32_t* inverse, int32_t* counts);

// Writes the positions of the slots below 0, `distinct` of the ids there, and how many there are of
// both: positions in sizes[0], distinct ids in sizes[1]. `seed` as of IdMap.
void absent(const int64_t* ids, const int32_t* slots, int64_t count, uint64_t seed,
            int32_t* positions, int64_t* unique, int32_t* inverse, int32_t* counts,
            int64_t* sizes);

// Writes the indices of the k smallest keys, in the order of (key, index), or of all if there are
// fewer. Keys count whose `eligible` is not 0; all if it is null. Returns how many were written.
int64_t smallest(const uint64_t* keys, const uint8_t* eligible, int64_t count, int64_t k,
                 int32_t* indices);

// For each slot, adds 1 to its count, which stays at its largest number, and sets its last use to
// `batch`. Slots below 0 are skipped. Returns `count`, or the position of the first slot that is
// not below `num_slots`; nothing is recorded then.
int64_t record_uses(const int32_t* slots, int64_t count, int64_t batch, uint32_t* counts,
                    int64_t* last_use, int64_t num_slots);

}  // namespace jaxrec

#endif  // JAXREC_TIER_BATCH_OPS_H_
