#include "new_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxrec {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kPatternBytes = 16384;

// Lookups go to random places of gigabytes. With pages of 4 KiB nearly each of them first misses in
// the processor's table of addresses, which costs as much as the row itself. Pages become huge only
// if this is asked before they are first written to; a system that refuses changes nothing.
void prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace

void new_rows(Team& team, const void* row, int64_t row_bytes, int64_t num_rows, void* out) {
  if (row_bytes == 0 || num_rows == 0) return;
  char* begin = static_cast<char*>(out);
  prefer_huge_pages(begin, row_bytes * num_rows);

  const int64_t rows_in_pattern = std::max<int64_t>(1, kPatternBytes / row_bytes);
  std::vector<char> pattern(rows_in_pattern * row_bytes);
  for (int64_t i = 0; i < rows_in_pattern; ++i) {
    std::memcpy(pattern.data() + i * row_bytes, row, row_bytes);
  }
  const int64_t step = std::max(rows_in_pattern, kPieceBytes / row_bytes);
  team.run((num_rows + step - 1) / step, [&](int64_t piece) {
    const int64_t last = std::min((piece + 1) * step, num_rows);
    for (int64_t i = piece * step; i < last; i += rows_in_pattern) {
      std::memcpy(begin + i * row_bytes, pattern.data(),
                  std::min(rows_in_pattern, last - i) * row_bytes);
    }
  });
}

}  // namespace jaxrec
