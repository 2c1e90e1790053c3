// Kernels for x86-64 machines with AVX-512.
#include "kernels.h"

#if defined(__x86_64__)
#include "machine.h"

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prfchw")
#include <immintrin.h>
#endif

// The compiler may not define __F16C__ here: GCC reads the file before it obeys the pragma.
#define JAXREC_F16C
#define JAXREC_ISA avx512
#define JAXREC_ISA_NAME "avx512"
#define JAXREC_VECTOR_BYTES 64
#include "kernels_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace jaxrec {
const Kernels* avx512_kernels() {
  const unsigned sets = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const bool has = has_instructions(bit_FMA | bit_F16C, sets, kZmm);
  return has ? &avx512::kKernels : nullptr;
}
}  // namespace jaxrec

#else

namespace jaxrec {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace jaxrec

#endif
