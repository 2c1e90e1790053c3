#include "batch_ladder.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>

#include "jaxrec/serving/error.h"

namespace jaxrec::serving {
namespace {

constexpr size_t kAlignment = 64;  // XLA copies arguments that are aligned to less

// Calls f(ragged input's number, its columns) for each ragged input.
template <class Function>
void for_each_ragged(const Request& request, Function f) {
  size_t number = 0;
  for (const auto& input : request.inputs) {
    if (const auto* columns = std::get_if<std::vector<Column>>(&input)) f(number++, *columns);
  }
}

// Number of samples from `start` on that fit a size.
int64_t fitting(const Request& request, const BatchSize& size, int64_t start) {
  int64_t stop = start + std::min(size.samples, request.samples - start);
  for_each_ragged(request, [&](size_t number, const std::vector<Column>& columns) {
    for (size_t i = 0; i < columns.size(); ++i) {
      const std::vector<int64_t>& offsets = columns[i].offsets;
      const int64_t room = offsets[static_cast<size_t>(start)] + size.capacities[number][i];
      if (offsets[static_cast<size_t>(stop)] <= room) continue;
      stop = std::upper_bound(offsets.begin() + start, offsets.begin() + stop, room) -
             offsets.begin() - 1;
    }
  });
  return stop - start;
}

RequestError too_long(const BatchSpec& spec, const Request& request, int64_t sample) {
  const BatchSize& largest = spec.sizes.back();
  const auto i = static_cast<size_t>(sample);
  size_t number = 0;
  for (size_t input = 0; input < spec.inputs.size(); ++input) {
    const auto* ragged = std::get_if<RaggedSpec>(&spec.inputs[input]);
    if (ragged == nullptr) continue;
    const auto& columns = std::get<std::vector<Column>>(request.inputs[input]);
    for (size_t k = 0; k < columns.size(); ++k) {
      const int64_t count = columns[k].offsets[i + 1] - columns[k].offsets[i];
      const int64_t capacity = largest.capacities[number][k];
      if (count <= capacity) continue;
      return RequestError("feature '" + ragged->features[k].name + "', sample " +
                          std::to_string(sample) + ": " + std::to_string(count) +
                          " ids, and the model takes " + std::to_string(capacity) +
                          " at most in a batch; give fewer, or export it with larger "
                          "ids_per_sample or batch_sizes");
    }
    ++number;
  }
  return RequestError("sample " + std::to_string(sample) + " has more ids than a batch takes");
}

HostArray add(PackedChunk& packed, DType dtype, std::vector<int64_t> shape) {
  size_t bytes = size_of(dtype);
  for (const int64_t size : shape) bytes *= static_cast<size_t>(size);
  packed.memory.emplace_back(bytes);
  packed.arrays.push_back({packed.memory.back().data(), dtype, std::move(shape)});
  return packed.arrays.back();
}

void pack_array(const ArraySpec& spec, const ArrayValues& values, const Chunk& chunk,
                int64_t samples, PackedChunk& packed) {
  std::vector<int64_t> shape = {samples};
  shape.insert(shape.end(), spec.shape.begin(), spec.shape.end());
  add(packed, spec.dtype, std::move(shape));
  const size_t bytes = spec.bytes();
  if (bytes == 0) return;
  std::memcpy(packed.memory.back().data(), values.data() + static_cast<size_t>(chunk.start) * bytes,
              static_cast<size_t>(chunk.stop - chunk.start) * bytes);
}

void pack_ragged(const RaggedSpec& spec, const std::vector<Column>& columns, const Chunk& chunk,
                 const BatchSize& size, const std::vector<int64_t>& capacities,
                 PackedChunk& packed) {
  int64_t total = 0;
  for (const int64_t capacity : capacities) total += capacity;
  add(packed, DType::kInt32, {total});
  auto* values = reinterpret_cast<int32_t*>(packed.memory.back().data());
  add(packed, DType::kInt32, {static_cast<int64_t>(columns.size()) * size.samples});
  auto* lengths = reinterpret_cast<int32_t*>(packed.memory.back().data());
  float* weights = nullptr;
  if (spec.is_weighted) {
    add(packed, DType::kFloat32, {total});
    weights = reinterpret_cast<float*>(packed.memory.back().data());
  }
  for (size_t i = 0; i < columns.size(); ++i) {
    const Column& column = columns[i];
    const int64_t* offsets = column.offsets.data() + chunk.start;
    const int64_t first = offsets[0], count = offsets[chunk.stop - chunk.start] - first;
    for (int64_t k = 0; k < count; ++k) {
      values[k] = static_cast<int32_t>(column.ids[static_cast<size_t>(first + k)]);
    }
    for (int64_t k = 0; k < chunk.stop - chunk.start; ++k) {
      lengths[k] = static_cast<int32_t>(offsets[k + 1] - offsets[k]);
    }
    values += capacities[i];
    lengths += size.samples;
    if (weights != nullptr) {
      std::copy_n(column.weights.begin() + first, count, weights);
      weights += capacities[i];
    }
  }
}

}  // namespace

Chunk next_chunk(const BatchSpec& spec, const Request& request, int64_t start) {
  std::optional<Chunk> best;
  int64_t best_count = 0;
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    const int64_t count = fitting(request, spec.sizes[i], start);
    const auto is_filled = [&] { return count >= spec.sizes[i].samples - count; };
    const auto is_best_filled = [&] {
      return best_count >= spec.sizes[best->size].samples - best_count;
    };
    if (best ? count > best_count && (is_filled() || !is_best_filled()) : count > 0) {
      best = Chunk{start, start + count, i};
      best_count = count;
    }
  }
  if (!best) throw too_long(spec, request, start);
  return *best;
}

Buffer::Buffer(size_t bytes) {
  const size_t rounded = (bytes / kAlignment + 1) * kAlignment;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded)));
  if (memory_ == nullptr) throw std::bad_alloc();
  std::memset(memory_.get(), 0, rounded);
}

PackedChunk pack(const BatchSpec& spec, const Request& request, const Chunk& chunk) {
  PackedChunk packed;
  const BatchSize& size = spec.sizes[chunk.size];
  size_t number = 0;
  for (size_t i = 0; i < spec.inputs.size(); ++i) {
    if (const auto* array = std::get_if<ArraySpec>(&spec.inputs[i])) {
      pack_array(*array, std::get<ArrayValues>(request.inputs[i]), chunk, size.samples, packed);
    } else {
      pack_ragged(std::get<RaggedSpec>(spec.inputs[i]),
                  std::get<std::vector<Column>>(request.inputs[i]), chunk, size,
                  size.capacities[number++], packed);
    }
  }
  return packed;
}

}  // namespace jaxrec::serving
