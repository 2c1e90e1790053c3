// The kernels for one instruction set: the including file has chosen JAXREC_ISA, its name and the
// width of its vectors, and made the compiler use it.

namespace jaxrec {
namespace JAXREC_ISA {
namespace {

#include "vector.h"
#include "pool.h"

}  // namespace

const Kernels kKernels = {JAXREC_ISA_NAME, pool};

}  // namespace JAXREC_ISA
}  // namespace jaxrec
