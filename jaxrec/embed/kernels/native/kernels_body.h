// The kernels for one instruction set: the including file has chosen JAXREC_ISA, its name and the
// width of its vectors, and made the compiler use it.

namespace jaxrec {
namespace JAXREC_ISA {
namespace {

#include "vector.h"
#include "sums.h"

#include "pool.h"

#include "codes.h"
#include "packed.h"

#include "maxima.h"

#include "optimizers.h"

#include "update.h"

#include "pairs.h"

#include "attention_tiles.h"

}  // namespace

const Kernels kKernels = {JAXREC_ISA_NAME, pool, copy_rows, pool_packed, find_max,
                          find_max_packed, unpack_rows, packed_row_bytes_of, update, sum_runs, sum,
                          apply, add_rows, multiply_pairs, sum_pairs, attend_row,
                          attend_row_gradients};

}  // namespace JAXREC_ISA
}  // namespace jaxrec
