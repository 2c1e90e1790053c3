// Kernels for any machine of the family: SSE2 on x86-64, NEON on 64-bit Arm.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#endif

#define JAXREC_ISA portable
#define JAXREC_ISA_NAME "portable"
#define JAXREC_VECTOR_BYTES 16
#include "kernels_body.h"

namespace jaxrec {
const Kernels& portable_kernels() { return portable::kKernels; }
}  // namespace jaxrec
