// Runs of equal rows, and buckets of lookups by owner.
#ifndef JAXREC_RUNS_H_
#define JAXREC_RUNS_H_

#include <cstdint>

#include "team.h"

namespace jaxrec {

// The arrays of `Runs` in base.py, `count` elements each.
void build_runs(Team& team, const int32_t* rows, int64_t count, int64_t num_rows, int32_t* order,
                int32_t* segments, int32_t* unique, int32_t* inverse);

// The arrays of `Buckets` in base.py: `order` has `count` elements, `counts` has `num_owners`.
void bucket(Team& team, const int32_t* owners, int64_t count, int64_t num_owners, int32_t* order,
            int32_t* counts);

}  // namespace jaxrec

#endif  // JAXREC_RUNS_H_
