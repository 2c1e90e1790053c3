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
};

int64_t sum_lengths(const int32_t* lengths, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::max(lengths[i], 0);
  return sum;
}

// Cuts a batch into blocks of about equal numbers of bags. Blocks of the same bags of all features
// follow each other, so that rows of the output are finished while they are in the cache.
std::vector<Block> cut(const Batch& batch, int num_threads) {
  int64_t num_bags = 0;
  for (const Feature& feature : batch.features) num_bags += feature.stride;
  const int64_t size = std::clamp<int64_t>(num_bags / (num_threads * 16), 16, JAXREC_BAGS);

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
      blocks.push_back({static_cast<int32_t>(f), bag, count, positions[f]});
      int64_t used = sum_lengths(batch.lengths + feature.length_start + bag, count);
      positions[f] = std::min(positions[f] + used, feature.capacity);
    }
  }
  return blocks;
}

Table rows_of(const Table& table, const Feature& feature) {
  char* rows = static_cast<char*>(table.rows);
  return {rows + feature.row_offset * table.dim * size_of(table.type), table.type,
          feature.row_count, table.dim};
}

}  // namespace

void pooled_lookup(Team& team, const Table& table, const Batch& batch, void* out, Type out_type) {
  const std::vector<Block> blocks = cut(batch, team.num_threads());
  const Kernels& kernel = kernels();
  team.run(static_cast<int64_t>(blocks.size()), [&](int64_t piece) {
    const Block& block = blocks[piece];
    const Feature& feature = batch.features[block.feature];
    const int64_t start = feature.id_start + block.position;
    const int64_t row = feature.out_row + block.bag * feature.out_step;
    PooledBlock job;
    job.table = rows_of(table, feature);
    job.ids = batch.ids + start;
    job.num_ids = feature.capacity - block.position;
    job.lengths = batch.lengths + feature.length_start + block.bag;
    job.num_bags = block.num_bags;
    job.weights = batch.weights == nullptr ? nullptr : batch.weights + start;
    job.mean = feature.mean;
    job.out = static_cast<char*>(out) + row * table.dim * size_of(out_type);
    job.out_type = out_type;
    job.out_stride = feature.out_step * table.dim;
    kernel.pool(job);
  });
}

}  // namespace jaxrec
