// Row numbers from one numbering to another.
#ifndef JAXREC_SHIFT_H_
#define JAXREC_SHIFT_H_

#include <cstdint>

#include "team.h"

namespace jaxrec {

// Adds to each row the shift of the stretch it lies in: stretch i begins at row starts[i], ascending
// from 0, and ends where the next begins, the last at `num_rows`. Rows outside become `outside`.
void shift_rows(Team& team, const int32_t* rows, int64_t count, const int64_t* starts,
                const int64_t* shifts, int64_t num_stretches, int64_t num_rows, int32_t outside,
                int32_t* out);

}  // namespace jaxrec

#endif  // JAXREC_SHIFT_H_
