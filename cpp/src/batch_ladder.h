// Requests cut to the sizes that a model is compiled for, and padded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "jaxrec/serving/manifest.h"
#include "jaxrec/serving/request.h"
#include "jaxrec/serving/runtime.h"

namespace jaxrec::serving {

// Samples of a request that one program predicts.
struct Chunk {
  int64_t start;
  int64_t stop;
  size_t size;  // index in BatchSpec::sizes
};

// Returns the chunk that begins at a sample. Each chunk but one that long bags make smaller fills
// at least half of its size. Throws RequestError where a sample has more ids than fit a batch.
Chunk next_chunk(const BatchSpec& spec, const Request& request, int64_t start);

// Zeroed memory that programs read where it lies.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  std::byte* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
};

// The arrays of a chunk as the program takes them.
struct PackedChunk {
  std::vector<Buffer> memory;
  std::vector<HostArray> arrays;
};

PackedChunk pack(const BatchSpec& spec, const Request& request, const Chunk& chunk);

}  // namespace jaxrec::serving
