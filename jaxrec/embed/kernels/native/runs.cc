#include "runs.h"

#include <algorithm>
#include <vector>

#include "sort.h"

namespace jaxrec {
namespace {

constexpr int64_t kStretch = 8192;

bool begins_run(const Entry* entries, int64_t i) {
  return i == 0 || entries[i].row != entries[i - 1].row;
}

Sorted sort_positions(Team& team, const int32_t* rows, int64_t count, int64_t num_rows) {
  return sort_by_row(team, rows, count, num_rows, {nullptr, count, true}, true);
}

}  // namespace

void build_runs(Team& team, const int32_t* rows, int64_t count, int64_t num_rows, int32_t* order,
                int32_t* segments, int32_t* unique, int32_t* inverse) {
  const Sorted sorted = sort_positions(team, rows, count, num_rows);
  const Entry* entries = sorted.entries;
  const int64_t stretches = (count + kStretch - 1) / kStretch;

  // The number of the run that each stretch begins with.
  std::vector<int64_t> first_run(stretches + 1, 0);
  team.run(stretches, [&](int64_t s) {
    const int64_t end = std::min((s + 1) * kStretch, count);
    int64_t begun = 0;
    for (int64_t i = s * kStretch; i < end; ++i) begun += begins_run(entries, i);
    first_run[s + 1] = begun;
  });
  for (int64_t s = 0; s < stretches; ++s) first_run[s + 1] += first_run[s];

  const int64_t num_runs = first_run[stretches];
  team.run(stretches, [&](int64_t s) {
    const int64_t end = std::min((s + 1) * kStretch, count);
    int64_t run = first_run[s] - 1;
    for (int64_t i = s * kStretch; i < end; ++i) {
      if (begins_run(entries, i)) unique[++run] = static_cast<int32_t>(entries[i].row);
      order[i] = static_cast<int32_t>(entries[i].value);
      segments[i] = static_cast<int32_t>(run);
      inverse[entries[i].value] = static_cast<int32_t>(run);
    }
  });
  std::fill(unique + num_runs, unique + count, static_cast<int32_t>(num_rows));
}

void bucket(Team& team, const int32_t* owners, int64_t count, int64_t num_owners, int32_t* order,
            int32_t* counts) {
  const Sorted sorted = sort_positions(team, owners, count, num_owners);
  std::fill(counts, counts + num_owners, 0);
  for (int64_t i = 0; i < count; ++i) {
    const Entry& entry = sorted.entries[i];
    order[i] = static_cast<int32_t>(entry.value);
    if (entry.row < num_owners) ++counts[entry.row];
  }
}

}  // namespace jaxrec
