// Kernels for x86-64 machines with AVX2.
#include "kernels.h"

#if defined(__x86_64__)
#include "machine.h"

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#endif

// The compiler may not define __F16C__ here: GCC reads the file before it obeys the pragma.
#define JAXREC_F16C
#define JAXREC_ISA avx2
#define JAXREC_ISA_NAME "avx2"
#define JAXREC_VECTOR_BYTES 32
#include "kernels_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jaxrec {
const Kernels* avx2_kernels() {
  const bool has = has_instructions(bit_FMA | bit_F16C, bit_AVX2, kYmm);
  return has ? &avx2::kKernels : nullptr;
}
}  // namespace jaxrec

#else

namespace jaxrec {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace jaxrec

#endif
