#include <atomic>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(__x86_64__)
#include "machine.h"
#endif

namespace jaxrec {
namespace {

Prefetching choose_prefetching() {
#if defined(__x86_64__)
  if (amd_family() >= kZen5) return {true, 16384};
#endif
  return {false, 65536};
}

const Kernels* best() {
  if (const Kernels* kernels = avx512_kernels()) return kernels;
  if (const Kernels* kernels = avx2_kernels()) return kernels;
  return &portable_kernels();
}

std::atomic<const Kernels*>& selected() {
  static std::atomic<const Kernels*> kernels{best()};
  return kernels;
}

}  // namespace

const Prefetching& prefetching() {
  static const Prefetching chosen = choose_prefetching();
  return chosen;
}

const Kernels& kernels() { return *selected().load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  for (const Kernels* kernels : {avx512_kernels(), avx2_kernels(), &portable_kernels()}) {
    if (kernels != nullptr && std::strcmp(kernels->name, name) == 0) {
      selected().store(kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace jaxrec
