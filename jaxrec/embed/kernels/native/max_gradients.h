// Gradients of the rows that had the largest elements of their bags.
#ifndef JAXREC_MAX_GRADIENTS_H_
#define JAXREC_MAX_GRADIENTS_H_

#include <cstdint>

#include "team.h"

namespace jaxrec {

// Fills `out`, `[num_lookups, dim]`: the gradient of each element of a bag, `[num_bags, dim]`, goes to
// the lookup that `winners` names, in the same column. All other elements are 0; a number outside of
// the lookups names none. No two bags name one lookup.
void max_gradients(Team& team, const int32_t* winners, const float* gradients, int64_t num_bags,
                   int64_t dim, float* out, int64_t num_lookups);

}  // namespace jaxrec

#endif  // JAXREC_MAX_GRADIENTS_H_
