// Pointwise attention within ragged rows (HSTU's), and its gradients.
#ifndef JAXREC_ATTENTION_H_
#define JAXREC_ATTENTION_H_

#include "kernels.h"
#include "team.h"

namespace jaxrec {

// Elements of rows one after the other: queries and keys `[elements, heads, dim]`, values
// `[elements, heads, value_dim]`. Offsets say where rows begin, `[num_rows + 1]` of queries and of
// keys. Those that are not ascending or past the arrays' ends are cut.
struct Attention {
  const float* query;
  const float* key;
  const float* value;
  int64_t num_queries, num_keys, heads, dim, value_dim;
  KeyRanges ranges;              // Of each query; positions are those of keys.
  const int32_t* query_offsets;
  const int32_t* key_offsets;
  int64_t num_rows;
  const float* bias;             // `[distances, heads]`, or null.
  int64_t distances;
  float alpha;
};

// The gradients of queries, keys, values and bias (which may be null) of an output's gradient.
struct AttentionGradients {
  const float* gradient;
  float* of_query;
  float* of_key;
  float* of_value;
  float* of_bias;
};

// Writes SiLU(alpha q k + bias) v, summed over the keys that each query sees.
void attend(Team& team, const Attention& attention, float* out);

// Sums do not depend on the number of threads.
void attend_gradients(Team& team, const Attention& attention, const AttentionGradients& gradients);

}  // namespace jaxrec

#endif  // JAXREC_ATTENTION_H_
