// Sorting of lookups by row.
#ifndef JAXREC_SORT_H_
#define JAXREC_SORT_H_

#include <cstdint>
#include <memory>

#include "kernels.h"
#include "team.h"

namespace jaxrec {

// Lookups in the order of their rows; lookups of the same row keep their order.
struct Sorted {
  std::unique_ptr<Entry[]> memory;
  const Entry* entries;
  int64_t count;
};

// What a lookup reads or belongs to.
struct Values {
  const int32_t* values;  // Of each lookup; null: its position.
  int64_t count;          // They lie in [0, count); a lookup whose value does not is left out.
  bool carry_positions;   // Whether entries carry positions all the same.
};

// Sorts `rows`. A row outside [0, num_rows) becomes `num_rows` (and so comes last), or is left out
// unless `keep_outside`.
Sorted sort_by_row(Team& team, const int32_t* rows, int64_t count, int64_t num_rows, Values values,
                   bool keep_outside);

}  // namespace jaxrec

#endif  // JAXREC_SORT_H_
