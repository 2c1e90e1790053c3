#include "sort.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace jaxrec {
namespace {

// A radix sort looks at the bits of the rows digit by digit, from the last: each pass counts how
// often a digit has each value and then moves every entry to its place.
struct Digits {
  int count;
  int bits;
};

Digits choose_digits(int64_t num_entries, int64_t largest) {
  int bits = 1;
  while (bits < 32 && (largest >> bits) != 0) ++bits;
  // Wide digits make few passes; but each pass also goes over all values of a digit.
  int widest = num_entries < 4096 ? 8 : num_entries < 65536 ? 11 : 12;
  int count = (bits + widest - 1) / widest;
  return {count, (bits + count - 1) / count};
}

// One pass over entries that read(i, entry) gives (false: there is none), into `out`; returns how
// many there were. Each thread moves a stretch of the entries, in order, so that the pass is stable
// and its result does not depend on the number of threads.
template <class Read>
int64_t move_by_digit(Team& team, int64_t count, int shift, int bits, Entry* out,
                      const Read& read) {
  const int64_t num_values = int64_t{1} << bits;
  const uint32_t mask = static_cast<uint32_t>(num_values - 1);
  const int64_t stretches = std::clamp<int64_t>(count / 4096, 1, team.num_threads());
  const int64_t length = (count + stretches - 1) / stretches;
  std::vector<uint32_t> places(stretches * num_values, 0);

  team.run(stretches, [&](int64_t stretch) {
    uint32_t* counts = places.data() + stretch * num_values;
    const int64_t end = std::min(count, (stretch + 1) * length);
    Entry entry;
    for (int64_t i = stretch * length; i < end; ++i) {
      if (read(i, entry)) ++counts[(entry.row >> shift) & mask];
    }
  });
  uint32_t place = 0;
  for (int64_t value = 0; value < num_values; ++value) {
    for (int64_t stretch = 0; stretch < stretches; ++stretch) {
      place += std::exchange(places[stretch * num_values + value], place);
    }
  }
  team.run(stretches, [&](int64_t stretch) {
    uint32_t* next = places.data() + stretch * num_values;
    const int64_t end = std::min(count, (stretch + 1) * length);
    Entry entry;
    for (int64_t i = stretch * length; i < end; ++i) {
      if (read(i, entry)) out[next[(entry.row >> shift) & mask]++] = entry;
    }
  });
  return place;
}

}  // namespace

Sorted sort_by_row(Team& team, const int32_t* rows, int64_t count, int64_t num_rows, Values values,
                   bool keep_outside) {
  const Digits digits = choose_digits(count, keep_outside ? num_rows : num_rows - 1);
  const uint32_t outside = static_cast<uint32_t>(num_rows);
  std::unique_ptr<Entry[]> memory(new Entry[2 * count]);
  Entry* from = memory.get();
  Entry* to = from + count;

  count = move_by_digit(team, count, 0, digits.bits, to, [=](int64_t i, Entry& entry) {
    const uint32_t position = static_cast<uint32_t>(i);
    const uint32_t value =
        values.values == nullptr ? position : static_cast<uint32_t>(values.values[i]);
    entry.row = std::min(static_cast<uint32_t>(rows[i]), outside);
    entry.value = values.carry_positions ? position : value;
    return (keep_outside || entry.row < outside) && value < values.count;
  });
  for (int digit = 1; digit < digits.count; ++digit) {
    std::swap(from, to);
    move_by_digit(team, count, digit * digits.bits, digits.bits, to,
                  [from](int64_t i, Entry& entry) {
                    entry = from[i];
                    return true;
                  });
  }
  return {std::move(memory), to, count};
}

}  // namespace jaxrec
