#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace jaxrec {
namespace {

const Kernels& select() {
  const Kernels* available[] = {avx512_kernels(), avx2_kernels(), &portable_kernels()};
  const char* wanted = std::getenv("JAXREC_NATIVE_ISA");
  for (const Kernels* kernels : available) {
    if (kernels == nullptr) continue;
    if (wanted == nullptr || std::strcmp(wanted, kernels->name) == 0) return *kernels;
  }
  return portable_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& selected = select();
  return selected;
}

}  // namespace jaxrec
