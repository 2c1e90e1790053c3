#include "update_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "sort.h"

namespace jaxrec {
namespace {

// The long runs are summed piece by piece, all pieces at once, then piece by piece added up.
void update_long_runs(Team& team, const Table& table, const Step& step, const Gradients& gradients,
                      const Entry* entries, const std::vector<LongRun>& runs) {
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
  const int64_t dim = table.dim;
  std::unique_ptr<float[]> sums(new float[pieces.size() * dim]);
  team.run(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
    kernel.sum(gradients, entries, pieces[p].begin, pieces[p].end, sums.get() + p * dim);
  });
  team.run(static_cast<int64_t>(runs.size()), [&](int64_t r) {
    float* first = sums.get() + first_piece[r] * dim;
    kernel.add_rows(first, first_piece[r + 1] - first_piece[r], dim, first);
    kernel.apply(table, step, entries[runs[r].begin].row, first);
  });
}

}  // namespace

void fused_update(Team& team, const Table& table, const Step& step, const int32_t* rows,
                  int64_t num_lookups, Gradients gradients) {
  // An entry carries its bag, or its position where that leads to more than the bag.
  const bool by_position = gradients.scales != nullptr;
  const Sorted sorted = sort_by_row(team, rows, num_lookups, table.num_rows,
                                    {gradients.bags, gradients.num_bags, by_position}, false);
  if (!by_position) gradients.bags = nullptr;

  const int64_t stretch =
      std::clamp<int64_t>(sorted.count / (team.num_threads() * 16), 256, 8192);
  const int64_t stretches = (sorted.count + stretch - 1) / stretch;
  const int64_t most_long_runs = stretch / kPiece + 1;
  std::vector<LongRun> long_runs(stretches * most_long_runs);
  std::vector<int64_t> num_long_runs(stretches);
  const Kernels& kernel = kernels();
  team.run(stretches, [&](int64_t s) {
    UpdateBlock block = {table, gradients, step, sorted.entries, sorted.count, s * stretch,
                         std::min((s + 1) * stretch, sorted.count),
                         long_runs.data() + s * most_long_runs, 0};
    kernel.update(block);
    num_long_runs[s] = block.num_long_runs;
  });

  std::vector<LongRun> left;
  for (int64_t s = 0; s < stretches; ++s) {
    const LongRun* runs = long_runs.data() + s * most_long_runs;
    left.insert(left.end(), runs, runs + num_long_runs[s]);
  }
  if (!left.empty()) update_long_runs(team, table, step, gradients, sorted.entries, left);
}

void sum_rows(Team& team, const Table& sums, const int32_t* rows, int64_t num_lookups,
              Gradients gradients) {
  constexpr int64_t kRows = 1024;
  float* out = static_cast<float*>(sums.rows);
  team.run((sums.num_rows + kRows - 1) / kRows, [&](int64_t s) {
    const int64_t count = std::min(kRows, sums.num_rows - s * kRows);
    std::memset(out + s * kRows * sums.dim, 0, count * sums.dim * sizeof(float));
  });
  // SGD of rate -1 adds the gradient to the row.
  Step step = {};
  step.rule = Rule::kSgd;
  step.rate = -1.0f;
  step.max_norm = std::numeric_limits<float>::infinity();
  fused_update(team, sums, step, rows, num_lookups, gradients);
}

}  // namespace jaxrec
