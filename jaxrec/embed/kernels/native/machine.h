// This x86-64 machine and its instruction sets, by CPUID: __builtin_cpu_supports knows none of them
// in libraries that Zig's compiler has built (compiler-rt of Zig 0.17).
#ifndef JAXREC_MACHINE_H_
#define JAXREC_MACHINE_H_

#include <cpuid.h>

namespace jaxrec {

// Bits of XCR0: registers that the operating system keeps for each thread.
constexpr unsigned kYmm = 0x06, kZmm = 0xE6;

// Whether instructions may be used: `first` are bits of ecx of leaf 1, `extended` those of ebx of
// leaf 7 (Intel's manual, volume 2, CPUID).
inline bool has_instructions(unsigned first, unsigned extended, unsigned registers) {
  unsigned a, b, c, d;
  first |= bit_OSXSAVE;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & extended) != extended) return false;
  unsigned kept, high;
  asm("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  return (kept & registers) == registers;
}

// The families of AMD's processors.
constexpr unsigned kZen5 = 0x1A;

// The family of this processor; 0 where it is not AMD's (AMD's manual, volume 3, appendix E).
inline unsigned amd_family() {
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const unsigned base = (a >> 8) & 0xF, extended = (a >> 20) & 0xFF;
  return base == 0xF ? base + extended : base;
}

}  // namespace jaxrec

#endif  // JAXREC_MACHINE_H_
