#include "update_rows.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "sort.h"

namespace jaxrec {
namespace {

// Cuts the sorted lookups into stretches and calls work(begin, end, long_runs) for each, which gives
// the number of runs that it has put there instead of working on them. All of these.
template <class Work>
std::vector<LongRun> run_stretches(Team& team, int64_t count, const Work& work) {
  const int64_t share = count / (team.num_threads() * 16);
  const int64_t stretch = std::clamp<int64_t>(share, 256, kMostInStretch);
  const int64_t stretches = (count + stretch - 1) / stretch;
  const int64_t most_long_runs = stretch / kPiece + 1;
  std::vector<LongRun> long_runs(stretches * most_long_runs);
  std::vector<int64_t> num_long_runs(stretches);
  team.run(stretches, [&](int64_t s) {
    num_long_runs[s] = work(s * stretch, std::min((s + 1) * stretch, count),
                            long_runs.data() + s * most_long_runs);
  });
  std::vector<LongRun> found;
  for (int64_t s = 0; s < stretches; ++s) {
    const LongRun* runs = long_runs.data() + s * most_long_runs;
    found.insert(found.end(), runs, runs + num_long_runs[s]);
  }
  return found;
}

// The long runs are summed piece by piece, all pieces at once, then piece by piece added up. Calls
// use(row, sum) with each.
template <class Use>
void sum_long_runs(Team& team, const Gradients& gradients, const Entry* entries,
                   const std::vector<LongRun>& runs, const Use& use) {
  if (runs.empty()) return;
  struct Piece {
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece;
  for (const LongRun& run : runs) {
    first_piece.push_back(static_cast<int64_t>(pieces.size()));
    for (int64_t begin = run.begin; begin < run.end; begin += kPiece) {
      pieces.push_back({begin, std::min(begin + kPiece, run.end)});
    }
  }
  first_piece.push_back(static_cast<int64_t>(pieces.size()));

  const Kernels& kernel = kernels();
  const int64_t dim = gradients.dim;
  std::unique_ptr<float[]> sums(new float[pieces.size() * dim]);
  team.run(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
    kernel.sum(gradients, entries, pieces[p].begin, pieces[p].end, sums.get() + p * dim);
  });
  team.run(static_cast<int64_t>(runs.size()), [&](int64_t r) {
    float* first = sums.get() + first_piece[r] * dim;
    kernel.add_rows(first, first_piece[r + 1] - first_piece[r], dim, first);
    use(entries[runs[r].begin].row, first);
  });
}

// The lookups sorted by row. An entry carries its bag, or its position if lookups have scales, since
// a position leads to both. `gradients.bags` is null if the entries carry bags.
Sorted sort_lookups(Team& team, const int32_t* rows, int64_t num_lookups, int64_t num_rows,
                    Gradients& gradients) {
  const bool by_position = gradients.scales != nullptr;
  Sorted sorted = sort_by_row(team, rows, num_lookups, num_rows,
                              {gradients.bags, gradients.num_bags, by_position}, false);
  if (!by_position) gradients.bags = nullptr;
  return sorted;
}

}  // namespace

void fused_update(Team& team, const Table& table, const Step& step, const int32_t* rows,
                  int64_t num_lookups, Gradients gradients) {
  const Sorted sorted = sort_lookups(team, rows, num_lookups, table.num_rows, gradients);
  const Kernels& kernel = kernels();
  const std::vector<LongRun> left = run_stretches(
      team, sorted.count, [&](int64_t begin, int64_t end, LongRun* long_runs) {
        UpdateBlock block = {table, gradients, step, sorted.entries, sorted.count,
                             begin, end, long_runs, 0};
        kernel.update(block);
        return block.num_long_runs;
      });
  sum_long_runs(team, gradients, sorted.entries, left, [&](uint32_t row, const float* sum) {
    kernel.apply(table, step, row, sum);
  });
}

void sum_rows(Team& team, const Rows& sums, int64_t num_rows, const int32_t* rows,
              int64_t num_lookups, Gradients gradients) {
  const int64_t row_bytes = gradients.dim * static_cast<int64_t>(sizeof(float));
  const Sorted sorted = sort_lookups(team, rows, num_lookups, num_rows, gradients);
  if (sorted.count == 0) {
    for (int64_t part = 0; part < sums.num_parts; ++part) {
      std::memset(sums.parts[part], 0, sums.part_rows * row_bytes);
    }
    return;
  }
  const Kernels& kernel = kernels();
  const std::vector<LongRun> left = run_stretches(
      team, sorted.count, [&](int64_t begin, int64_t end, LongRun* long_runs) {
        SumBlock block = {&sums, num_rows, gradients, sorted.entries, sorted.count,
                          begin, end, long_runs, 0};
        kernel.sum_runs(block);
        return block.num_long_runs;
      });
  sum_long_runs(team, gradients, sorted.entries, left, [&](uint32_t row, const float* sum) {
    std::memcpy(sums.at(row, row_bytes), sum, row_bytes);
  });
}

}  // namespace jaxrec
