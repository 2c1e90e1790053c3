// Kernels for x86-64 machines with AVX-512.
#include "kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
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
  bool has = __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
  return has ? &avx512::kKernels : nullptr;
}
}  // namespace jaxrec

#else

namespace jaxrec {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace jaxrec

#endif
