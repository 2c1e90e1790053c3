// The update of the rows that occur in a batch, in parallel.
#ifndef JAXREC_UPDATE_ROWS_H_
#define JAXREC_UPDATE_ROWS_H_

#include <cstdint>

#include "kernels.h"
#include "team.h"

namespace jaxrec {

// Updates each row that occurs in `rows` once, by the sum of its lookups' gradients; rows outside
// the table are passed over. `gradients.bags`: the bag of each lookup; null: its own position.
void fused_update(Team& team, const Table& table, const Step& step, const int32_t* rows,
                  int64_t num_lookups, Gradients gradients);

// The sum of the gradients of each row's lookups, in float32; 0 for a row without any.
void sum_rows(Team& team, const Rows& sums, int64_t num_rows, const int32_t* rows,
              int64_t num_lookups, Gradients gradients);

}  // namespace jaxrec

#endif  // JAXREC_UPDATE_ROWS_H_
