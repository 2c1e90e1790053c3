// Memory for tables.
#ifndef JAXREC_NEW_ROWS_H_
#define JAXREC_NEW_ROWS_H_

#include <cstdint>

#include "team.h"

namespace jaxrec {

// Fills fresh memory with `num_rows` copies of a row, in huge pages where the system has them.
void new_rows(Team& team, const void* row, int64_t row_bytes, int64_t num_rows, void* out);

}  // namespace jaxrec

#endif  // JAXREC_NEW_ROWS_H_
