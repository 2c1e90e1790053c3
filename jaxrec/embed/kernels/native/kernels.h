// The work of one thread on one piece of a primitive, compiled once for each instruction set.
#ifndef JAXREC_KERNELS_H_
#define JAXREC_KERNELS_H_

#include <cstdint>

namespace jaxrec {

enum class Type { kF32, kBF16, kF16 };

constexpr int64_t size_of(Type type) { return type == Type::kF32 ? 4 : 2; }

// The longest rows the kernels take.
constexpr int64_t kMaxDim = 4096;

// Rows that lie one after the other, or in equal parts apart.
struct Rows {
  void* const* parts;
  int64_t num_parts;
  int64_t part_rows;  // In each.

  // Where a row begins.
  char* at(int64_t row, int64_t row_bytes) const {
    if (num_parts == 1) return static_cast<char*>(parts[0]) + row * row_bytes;
    const uint32_t part = static_cast<uint32_t>(row) / static_cast<uint32_t>(part_rows);
    return static_cast<char*>(parts[part]) + (row - part * part_rows) * row_bytes;
  }
};

// The table of a group or of a feature, `[num_rows, dim]`.
struct Table {
  void* rows;
  Type type;
  int64_t num_rows;
  int64_t dim;
};

// A feature's rows in a table that may lie in parts.
struct Source {
  const Rows* rows;
  int64_t first_row;
  Type type;
  int64_t num_rows;
  int64_t dim;
};

// How the rows of a packed table are stored; see jaxrec/embed/formats.
enum class Code { kInt8, kInt4, kInt2, kFloat8, kFusedInt8, kE4M3, kE5M2 };

// The packed rows of a group or of a feature.
struct PackedTable {
  const uint8_t* rows;
  Code code;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t dim;
};

// Consecutive bags of one feature.
struct Bags {
  const int32_t* ids;
  int64_t num_ids;         // Of these bags, up to the end of the feature's segment.
  const int32_t* lengths;  // Of each bag.
  int64_t num_bags;
  const float* weights;    // Of each id, or null.
  bool mean;
  void* out;               // Row of the first bag.
  Type out_type;
  int64_t out_stride;      // Elements from one bag's row to the next.
};

struct PooledBlock : Bags {
  Source table;  // The feature's.
};

struct PackedBlock : Bags {
  PackedTable table;  // The feature's.
};

// Where each column's largest element of a bag lies in the batch: its position among the lookups, or
// -1 for none. `winners` has the rows of the output, or is null where nobody asks.
struct Winners {
  int32_t* winners;        // Row of the first bag, as far from the next as in the output.
  int32_t first_position;  // Of the first bag's first id.
};

struct MaxBlock : Bags, Winners {
  Source table;  // The feature's.
};

struct PackedMaxBlock : Bags, Winners {
  PackedTable table;  // The feature's.
};

// Consecutive rows to copy.
struct RowBlock {
  Source table;
  const int32_t* rows;
  int64_t count;
  void* out;
};

// Consecutive packed rows to unpack.
struct PackedRowBlock {
  PackedTable table;
  const int32_t* rows;
  int64_t count;
  void* out;
  Type out_type;
};

// A row and the lookup that reads it: its position, or the bag it belongs to.
struct Entry {
  uint32_t row;
  uint32_t value;
};

// The gradient of each lookup: its bag's, bounded, times the lookup's scale.
struct Gradients {
  const Rows* rows;  // `[bags, dim]`
  Type type;
  int64_t dim;
  const int32_t* bags;   // Of each position; null where the value of an entry is the bag itself.
  int64_t num_bags;
  const float* scales;   // Of each position, or null. Not null only if values are positions.
  float bound;           // On the absolute value of an element; infinity: none.
};

enum class Rule { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kPartialRowwiseAdam };
enum class Decay { kNone, kL2, kDecoupled };

// One step of a row optimizer; see jaxrec/optim for the formulas.
struct Step {
  Rule rule;
  float rate;
  float eps;
  float b1, b2;
  float rest1, rest2;        // 1 - b, taken in double: in float it loses digits where b is near 1.
  float share1, share2;      // 1 - b^t, the same for all rows,
  float log_b1, log_b2;      // or what it is made of for each row's own t.
  bool counts_rows;          // Whether t is the row's own.
  float weight_decay;
  Decay decay;               // Of row-wise Adagrad; the others decouple it.
  float max_norm;            // Infinity: none.
  bool stochastic;           // Whether 16-bit rows are rounded at random,
  uint32_t step;             // which depends on this.
  float* first;              // The accumulator or the first moment of all rows; null: there is none.
  float* second;             // The second moment of all rows.
  float* counts;             // The updates of each row.
};

// A run of lookups of one row that is too long for one thread.
struct LongRun {
  int64_t begin;
  int64_t end;
};

// Lookups of a row are added in pieces of this many, whatever the number of threads, so that sums
// do not depend on it.
constexpr int64_t kPiece = 1024;

// The most lookups in a stretch.
constexpr int64_t kMostInStretch = 4096;

// The runs that begin within a stretch of the sorted lookups.
struct UpdateBlock {
  Table table;
  Gradients gradients;
  Step step;
  const Entry* entries;  // All of them,
  int64_t count;
  int64_t begin, end;    // and the stretch.
  LongRun* long_runs;    // Where runs of more than kPiece go that are left for later,
  int64_t num_long_runs; // and how many there were.
};

// The runs that begin within a stretch of the sorted lookups, to be summed: all rows of `sums` after
// that of the lookup before, up to that of the last lookup here. Rows without a lookup become 0.
struct SumBlock {
  const Rows* sums;
  int64_t num_rows;
  Gradients gradients;
  const Entry* entries;
  int64_t count;
  int64_t begin, end;
  LongRun* long_runs;
  int64_t num_long_runs;
};

// The vectors of some samples, `[num_samples, num_vectors, dim]`.
struct Vectors {
  const float* vectors;
  int64_t num_samples, num_vectors, dim;

  int64_t num_pairs() const { return num_vectors * (num_vectors - 1) / 2; }
};

// Samples whose vectors are multiplied, each with each.
struct PairBlock : Vectors {
  float* products;  // `[num_samples, pairs]`
};

// Samples whose vectors get gradients, given those of their products.
struct PairGradientBlock : Vectors {
  const float* gradient;  // `[num_samples, pairs]`
  float* out;             // Like the vectors.
};

// The keys that each query sees: from `first` to `last`, and from `group` to the query itself, by
// their positions in the array of keys. Without groups `group` is null.
struct KeyRanges {
  const int32_t* first;
  const int32_t* last;
  const int32_t* own;
  const int32_t* group;
};

// The keys that any of a block of queries sees.
struct Reach {
  int32_t first, last, group, own;
};

// Queries and keys of a tile of attention.
constexpr int64_t kAttentionTile = 64;

// One head of the attention within one row. Arrays begin at the head's columns of the first element
// of all rows; elements are `query_stride` or `value_stride` floats apart.
struct AttentionRow {
  const float* query;
  const float* key;
  const float* value;
  int64_t first_query, num_queries, first_key, num_keys;
  int64_t dim, value_dim, query_stride, value_stride;
  KeyRanges ranges;
  const Reach* reaches;  // Of each tile's queries.
  const float* bias;     // By key minus query, from `bias_origin` on; or null.
  int64_t bias_origin;
  float alpha;
  float* out;
  const float* gradient;  // Of the output.
  float* of_query;
  float* of_key;
  float* of_value;
  float* of_bias;  // Like the bias; or null.
};

// Floats of scratch for a row.
constexpr int64_t attention_scratch(int64_t dim, int64_t value_dim) {
  return (dim + value_dim + 2 * kAttentionTile) * kAttentionTile;
}

// How lookups ask for rows before they need them.
//
// Zen 4 reads random rows of 256 bytes at 24 GB/s on two cores if they are asked for into the
// second-level cache, and at 16 GB/s if into the first. On Zen 5 the first is the faster one: with
// it lookups of the benchmarks' shapes take 0.73 to 1.0 of their time.
struct Prefetching {
  bool into_first_level;  // Of the caches; else into the second.
  int64_t bytes_ahead;    // Enough to hide the latency of memory.
};

// The way of prefetching that suits this machine.
const Prefetching& prefetching();

struct Kernels {
  const char* name;
  void (*pool)(const PooledBlock&);
  void (*copy_rows)(const RowBlock&);
  void (*pool_packed)(const PackedBlock&);
  void (*find_max)(const MaxBlock&);
  void (*find_max_packed)(const PackedMaxBlock&);
  void (*unpack_rows)(const PackedRowBlock&);
  // The bytes of a packed row of `dim` columns; 0: there is no such code.
  int64_t (*packed_row_bytes)(Code, int64_t dim);
  void (*update)(UpdateBlock&);
  void (*sum_runs)(SumBlock&);
  // The sum of the gradients of entries [begin, end), in float32.
  void (*sum)(const Gradients&, const Entry* entries, int64_t begin, int64_t end, float* out);
  // Updates one row by its gradient.
  void (*apply)(const Table&, const Step&, uint32_t row, const float* gradient);
  // Adds `count` rows of float32.
  void (*add_rows)(const float* rows, int64_t count, int64_t dim, float* out);
  // The dot products of all pairs. `scratch` has multiply_pairs_scratch floats.
  void (*multiply_pairs)(const PairBlock&, float* scratch);
  // The gradients of the vectors.
  void (*sum_pairs)(const PairGradientBlock&);
  // Adds the row's output to zeros.
  void (*attend_row)(const AttentionRow&, float* scratch);
  // Adds the row's gradients to zeros.
  void (*attend_row_gradients)(const AttentionRow&, float* scratch);
};

// The widest vector of any instruction set, in floats.
constexpr int64_t kMostLanes = 16;

// The vectors whose products multiply_pairs computes before it writes them.
constexpr int64_t kPanel = 32;

// What multiply_pairs needs: the vectors of a sample transposed, and the products of some of them,
// with room behind each row.
inline int64_t multiply_pairs_scratch(const Vectors& of) {
  const int64_t rows = of.num_vectors < kPanel ? of.num_vectors : kPanel;
  return (of.dim + rows) * (of.num_vectors + kMostLanes);
}

const Kernels& portable_kernels();
const Kernels* avx2_kernels();  // Null where the machine lacks the instructions.
const Kernels* avx512_kernels();

// The best for this machine, or those selected.
const Kernels& kernels();

// Selects kernels by name, for tests; false where this machine has none of that name.
bool select_kernels(const char* name);

}  // namespace jaxrec

#endif  // JAXREC_KERNELS_H_
