// Gradients of the rows that had the largest elements of their bags.
#ifndef JAXREC_MAX_GRADIENTS_H_
#define JAXREC_MAX_GRADIENTS_H_

#include <cstdint>

#include "team.h"

namespace jaxrec {

// Fills `out`, `[num_lookups, dim]`: the gradient of each element of a bag, `[num_bags, dim]`, goes to
// the lookup that `winners` names, in the same column. All other elements are 0. `bags` has the bag of
// each lookup; a lookup of no bag gets zeros.
void max_gradients(Team& team, const int32_t* winners, const float* gradients, int64_t num_bags,
                   int64_t dim, const int32_t* bags, float* out, int64_t num_lookups);

}  // namespace jaxrec

#endif  // JAXREC_MAX_GRADIENTS_H_
