// The work of one thread on one piece of a primitive, compiled once for each instruction set.
#ifndef JAXREC_KERNELS_H_
#define JAXREC_KERNELS_H_

#include <cstdint>

namespace jaxrec {

enum class Type { kF32, kBF16, kF16 };

// The longest rows the kernels take.
constexpr int64_t kMaxDim = 4096;

constexpr int64_t size_of(Type type) { return type == Type::kF32 ? 4 : 2; }

// A group's table, `[num_rows, dim]`.
struct Table {
  void* rows;
  Type type;
  int64_t num_rows;
  int64_t dim;
};

// Consecutive bags of one feature.
struct PooledBlock {
  Table table;              // Its first row is the feature's first, its rows are the feature's.
  const int32_t* ids;       // Of the first bag.
  int64_t num_ids;          // From there to the end of the feature's segment.
  const int32_t* lengths;   // Of each bag.
  int64_t num_bags;
  const float* weights;     // Of each id, or null.
  bool mean;
  void* out;                // Row of the first bag.
  Type out_type;
  int64_t out_stride;       // Elements from one bag's row to the next.
};

// Consecutive rows to copy.
struct RowBlock {
  Table table;
  const int32_t* rows;
  int64_t count;
  void* out;
};

struct Kernels {
  const char* name;
  void (*pool)(const PooledBlock&);
  void (*copy_rows)(const RowBlock&);
};

const Kernels& portable_kernels();
const Kernels* avx2_kernels();    // Null where the machine lacks them.
const Kernels* avx512_kernels();

// The best for this machine; JAXREC_NATIVE_ISA may name a lesser one.
const Kernels& kernels();

}  // namespace jaxrec

#endif  // JAXREC_KERNELS_H_
