#include "lookup.h"

#include <algorithm>

namespace jaxrec {
namespace {

// Consecutive bags of one feature: a piece of work.
struct Block {
  int32_t feature;
  int64_t bag;
  int64_t num_bags;
  int64_t position;  // Of the first bag's first id in the feature's segment.
  int64_t num_ids;   // Up to the end of the segment.
};

int64_t sum_lengths(const int32_t* lengths, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::max(lengths[i], 0);
  return sum;
}

// Bags and ids, padding included, that one thread pools in less time than it takes to wake another.
constexpr int64_t kFew = 512;

int64_t count_bags(const Batch& batch) {
  int64_t bags = 0;
  for (const Feature& feature : batch.features) bags += feature.stride;
  return bags;
}

bool is_small(const Batch& batch) {
  int64_t ids = 0;
  for (const Feature& feature : batch.features) ids += feature.capacity;
  return count_bags(batch) + ids <= kFew;
}

// Cuts a batch into blocks of about equal numbers of bags. Blocks of the same bags of all features
// follow each other, so that rows of the output are finished while they are in the cache.
std::vector<Block> cut(const Batch& batch, int num_threads) {
  const int64_t num_bags = count_bags(batch);
  const int64_t size = std::clamp<int64_t>(num_bags / (num_threads * 16), 16, 256);

  std::vector<Block> blocks;
  blocks.reserve(num_bags / size + batch.features.size());
  std::vector<int64_t> positions(batch.features.size(), 0);
  bool any = true;
  for (int64_t bag = 0; any; bag += size) {
    any = false;
    for (size_t f = 0; f < batch.features.size(); ++f) {
      const Feature& feature = batch.features[f];
      if (bag >= feature.stride) continue;
      any = true;
      int64_t count = std::min(size, feature.stride - bag);
      int64_t used = sum_lengths(batch.lengths + feature.length_start + bag, count);
      used = std::min(used, feature.capacity - positions[f]);
      blocks.push_back({static_cast<int32_t>(f), bag, count, positions[f], used});
      positions[f] += used;
    }
  }
  return blocks;
}

Source rows_of(const Source& table, const Feature& feature) {
  return {table.rows, feature.row_offset, table.type, feature.row_count, table.dim};
}

PackedTable rows_of(const PackedTable& table, const Feature& feature) {
  const uint8_t* rows = table.rows + feature.row_offset * table.row_bytes;
  return {rows, table.code, feature.row_count, table.row_bytes, table.dim};
}

// Pools the bags of a batch in blocks. A block is a job of `kernel`; prepare(job, row, position) gets
// the row of its first bag in the output, and the position of its first id among all lookups.
template <class Job, class Table, class Prepare>
void pool_blocks(Team& team, const Table& table, const Batch& batch, const Rows& out,
                 Type out_type, void (*kernel)(const Job&), const Prepare& prepare) {
  const int64_t row_bytes = table.dim * size_of(out_type);
  const std::vector<Block> blocks = cut(batch, team.num_threads());
  team.run(static_cast<int64_t>(blocks.size()), [&](int64_t piece) {
    const Block& block = blocks[piece];
    const Feature& feature = batch.features[block.feature];
    // The bags of a feature lie in one part.
    const int64_t start = feature.id_start + block.position;
    const int64_t row = feature.out_row + block.bag * feature.out_step;
    Job job;
    job.table = rows_of(table, feature);
    job.ids = batch.ids + start;
    job.num_ids = block.num_ids;
    job.lengths = batch.lengths + feature.length_start + block.bag;
    job.num_bags = block.num_bags;
    job.weights = batch.weights == nullptr ? nullptr : batch.weights + start;
    job.mean = feature.mean;
    job.out = out.at(row, row_bytes);
    job.out_type = out_type;
    job.out_stride = feature.out_step * table.dim;
    prepare(job, row, feature.first_position + block.position);
    kernel(job);
  }, is_small(batch));
}

constexpr auto kAsIs = [](const auto&, int64_t, int64_t) {};

// Gives a job its rows of the winners; see Winners.
auto with_winners(int32_t* winners, int64_t dim) {
  return [=](auto& job, int64_t row, int64_t position) {
    job.winners = winners == nullptr ? nullptr : winners + row * dim;
    job.first_position = static_cast<int32_t>(position);
  };
}

}  // namespace

void pooled_lookup(Team& team, const Source& table, const Batch& batch, const Rows& out,
                   Type out_type) {
  pool_blocks(team, table, batch, out, out_type, kernels().pool, kAsIs);
}

void packed_pooled_lookup(Team& team, const PackedTable& table, const Batch& batch, void* out,
                          Type out_type) {
  pool_blocks(team, table, batch, Rows{&out, 1, 0}, out_type, kernels().pool_packed, kAsIs);
}

void max_lookup(Team& team, const Source& table, const Batch& batch, void* out, Type out_type,
                int32_t* winners) {
  pool_blocks(team, table, batch, Rows{&out, 1, 0}, out_type, kernels().find_max,
              with_winners(winners, table.dim));
}

void packed_max_lookup(Team& team, const PackedTable& table, const Batch& batch, void* out,
                       Type out_type, int32_t* winners) {
  pool_blocks(team, table, batch, Rows{&out, 1, 0}, out_type, kernels().find_max_packed,
              with_winners(winners, table.dim));
}

void flatten_bags(Team& team, int64_t num_rows, const Batch& batch, int32_t* rows, int32_t* bags,
                  float* scales) {
  const std::vector<Block> blocks = cut(batch, team.num_threads());
  const int32_t padding = static_cast<int32_t>(num_rows);
  // Positions of a feature's segment from `i` on are padding.
  auto pad = [&](const Feature& feature, int64_t i) {
    const int64_t begin = feature.first_position + i;
    const int64_t end = feature.first_position + feature.capacity;
    std::fill(rows + begin, rows + end, padding);
    std::fill(bags + begin, bags + end, 0);
    if (scales != nullptr) std::fill(scales + begin, scales + end, 0.0f);
  };
  for (const Feature& feature : batch.features) {
    if (feature.stride == 0) pad(feature, 0);  // No block is of a feature without bags.
  }
  team.run(static_cast<int64_t>(blocks.size()), [&](int64_t piece) {
    const Block& block = blocks[piece];
    const Feature& feature = batch.features[block.feature];
    const int32_t* ids = batch.ids + feature.id_start;
    const float* weights = batch.weights == nullptr ? nullptr : batch.weights + feature.id_start;
    const int32_t* lengths = batch.lengths + feature.length_start;
    int32_t* feature_rows = rows + feature.first_position;
    int32_t* feature_bags = bags + feature.first_position;
    float* feature_scales = scales == nullptr ? nullptr : scales + feature.first_position;

    int64_t i = block.position;
    for (int64_t bag = block.bag; bag < block.bag + block.num_bags; ++bag) {
      const int64_t length = std::max(lengths[bag], 0);
      const int64_t end = std::min(i + length, feature.capacity);
      const int32_t out_row = static_cast<int32_t>(feature.out_row + bag * feature.out_step);
      const float share = feature.mean && length > 1 ? 1.0f / static_cast<float>(length) : 1.0f;
      for (; i < end; ++i) {
        const bool inside = static_cast<uint32_t>(ids[i]) < feature.row_count;
        feature_rows[i] = inside ? ids[i] + static_cast<int32_t>(feature.row_offset) : kBadRow;
        feature_bags[i] = out_row;
        if (scales != nullptr) feature_scales[i] = weights == nullptr ? share : weights[i] * share;
      }
    }
    if (block.bag + block.num_bags == feature.stride) pad(feature, i);
  });
}

void row_lookup(Team& team, const Source& table, const int32_t* rows, int64_t count,
                const Rows& out) {
  const int64_t row_bytes = table.dim * size_of(table.type);
  const int64_t size = std::clamp<int64_t>(count / (team.num_threads() * 16), 16, 2048);
  const int64_t of_part = (out.part_rows + size - 1) / size;
  const Kernels& kernel = kernels();
  team.run(of_part * out.num_parts, [&](int64_t piece) {
    const int64_t first = piece / of_part * out.part_rows;
    const int64_t begin = first + piece % of_part * size;
    const int64_t end = std::min(begin + size, first + out.part_rows);
    kernel.copy_rows({table, rows + begin, end - begin, out.at(begin, row_bytes)});
  });
}

void packed_row_lookup(Team& team, const PackedTable& table, const int32_t* rows, int64_t count,
                       void* out, Type out_type) {
  const int64_t row_bytes = table.dim * size_of(out_type);
  const int64_t size = std::clamp<int64_t>(count / (team.num_threads() * 16), 16, 2048);
  const Kernels& kernel = kernels();
  team.run((count + size - 1) / size, [&](int64_t piece) {
    const int64_t begin = piece * size, end = std::min(begin + size, count);
    char* place = static_cast<char*>(out) + begin * row_bytes;
    kernel.unpack_rows({table, rows + begin, end - begin, place, out_type});
  });
}

}  // namespace jaxrec
