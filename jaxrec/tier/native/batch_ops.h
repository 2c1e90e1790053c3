// Functions of whole batches of ids, slots or keys.
#ifndef JAXREC_TIER_BATCH_OPS_H_
#define JAXREC_TIER_BATCH_OPS_H_

#include <cstdint>

#include "id_map.h"

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

// Uses of the rows of a table by one batch; rows below 0 are skipped.
struct Uses {
  const int32_t* rows;
  int64_t count;
  int64_t batch;
};

// Search of one table for rows that lose their ids. All fields have 8 bytes, so that Python writes
// them as an array.
struct Search {
  // Records of the rows, and uses that are recorded before the search.
  const int64_t* born;
  int64_t* last_use;
  uint32_t* counts;
  int64_t num_rows;
  const Uses* uses;
  int64_t num_uses;
  // A row is eligible if it has an id (`born` is not below 0), its last use is below `bound`, and it
  // is none of the `hits`, of which those below 0 are skipped.
  int64_t bound;
  const int32_t* hits;
  int64_t num_hits;
  // Keys of the rows; null: their last uses.
  const uint64_t* keys;
  // The `most` eligible rows of the smallest keys are found, or all if there are fewer; none if
  // there are fewer than `least`.
  int64_t least;
  int64_t most;
  int32_t* found;
  int64_t num_found;
  int64_t num_eligible;
  // Gets whether each row is eligible; null: nothing reads that.
  uint8_t* eligible;
};

// Searches tables, one after the other, so that each table's records come from memory once. Writes
// `found`, `num_found`, `num_eligible` and `eligible`. Returns `count`, or the index of the first
// table with a use or a hit of a row that it does not have.
int64_t search(Search* searches, int64_t count);

// Changes of a batch to the map of a table and to the records of its rows. All fields have 8 bytes,
// so that Python writes them as an array.
struct Change {
  IdMap* map;
  // Records of the rows.
  int64_t* ids;
  int64_t* born;
  uint32_t* counts;
  uint8_t* powers;
  // Rows that lose their ids, and room for these ids.
  const int32_t* victims;
  int64_t num_victims;
  int64_t* evicted_ids;
  // Ids that get rows.
  const int64_t* new_ids;
  const int32_t* new_rows;
  int64_t num_new;
  // Positions in `rows` of the ids that had no row, and for each of them the index in
  // `absent_rows` of the row that it gets.
  int32_t* rows;
  const int32_t* misses;
  const int32_t* inverse;
  int64_t num_misses;
  const int32_t* absent_rows;
};

// Carries out the changes of a batch, table by table. New ids are born in `batch` with a count of 0
// and the frequency class `power`. Returns `count`, or the index of the first table whose map
// refuses an id or lacks a victim: those after it are as before.
int64_t commit(const Change* changes, int64_t count, int64_t batch, uint8_t power);

// Evicted ids of one table. All fields have 8 bytes, so that Python writes them as an array.
struct Evictions {
  // For each id, or for each place that an id has, the number of its last eviction times 2^32, plus
  // its index there; 0: there was none.
  int64_t* last;
  // Ids or places; those below 0 were not evicted.
  const int64_t* places;
  int64_t count;
  // Numbers of the evictions under way, ascending. `add_evictions` adds the eviction `next`.
  const int64_t* numbers;
  int64_t num_numbers;
  int64_t next;
};

// Writes which of the places of each table were evicted last by an eviction under way: the position
// of its number in `numbers`, the index there, and the position among the places. What is written
// for a table follows what was written for the one before; its size goes to `sizes`.
void find_evictions(const Evictions* tables, int64_t count, int32_t* which, int32_t* index,
                    int32_t* positions, int64_t* sizes);

// Notes that the distinct places of each table, none below 0, are evicted.
void add_evictions(const Evictions* tables, int64_t count);

// Writes the sum and the exclusive or of the bits of each of some lists of ids: [lists, 2].
void fingerprint(const uint64_t* const* lists, const int64_t* counts, int64_t num_lists,
                 uint64_t* sums);

}  // namespace jaxrec

#endif  // JAXREC_TIER_BATCH_OPS_H_
