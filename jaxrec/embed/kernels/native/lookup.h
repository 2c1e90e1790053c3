// The lookups of a batch, in parallel.
#ifndef JAXREC_LOOKUP_H_
#define JAXREC_LOOKUP_H_

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace jaxrec {

// Where a feature lies in the arrays of a batch; see BagLayout in base.py.
struct Feature {
  int64_t id_start;
  int64_t capacity;
  int64_t length_start;
  int64_t stride;
  int64_t row_offset;
  int64_t row_count;
  bool mean;
  int64_t first_position;  // Of its segment among all the features' segments.
  int64_t out_row;         // Row of the output that holds its first bag,
  int64_t out_step;        // and rows from there to the next.
};

struct Batch {
  const int32_t* ids;
  const int32_t* lengths;
  const float* weights;  // Or null.
  std::vector<Feature> features;
};

constexpr int32_t kBadRow = -1;  // `BAD_ROW` of base.py: the row of an id outside its table.

// The sums or means of each bag's rows, `[bags, dim]`.
void pooled_lookup(Team& team, const Source& table, const Batch& batch, const Rows& out,
                   Type out_type);

// The sums or means of each bag's packed rows, `[bags, dim]`.
void packed_pooled_lookup(Team& team, const PackedTable& table, const Batch& batch, void* out,
                          Type out_type);

// The largest element of each column over a bag's rows, `[bags, dim]`, and where it lies: see Winners.
// `winners` may be null.
void max_lookup(Team& team, const Source& table, const Batch& batch, void* out, Type out_type,
                int32_t* winners);

// The same of packed rows.
void packed_max_lookup(Team& team, const PackedTable& table, const Batch& batch, void* out,
                       Type out_type, int32_t* winners);

// The batch as flat lookups; see `Lookups` in base.py. `scales` may be null.
void flatten_bags(Team& team, int64_t num_rows, const Batch& batch, int32_t* rows, int32_t* bags,
                  float* scales);

// The rows; zeros where `rows` is the number of rows, NaN where it lies outside otherwise.
void row_lookup(Team& team, const Source& table, const int32_t* rows, int64_t count,
                const Rows& out);

// The same of packed rows.
void packed_row_lookup(Team& team, const PackedTable& table, const int32_t* rows, int64_t count,
                       void* out, Type out_type);

}  // namespace jaxrec

#endif  // JAXREC_LOOKUP_H_
