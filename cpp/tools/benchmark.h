// Latency and throughput of a model in this process.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "jaxrec/serving/model.h"

namespace jaxrec::serving {

struct BenchmarkOptions {
  std::vector<int64_t> batches = {1, 64, 1024};  // samples of a request
  double seconds = 5;                            // for each batch
  int threads = 1;                               // that predict at once
};

// Returns valid requests: ids are drawn evenly from those of each table.
Request draw_request(const BatchSpec& spec, int64_t samples);

// Predicts samples of `pool`, one request after the other in each thread, and prints a line of JSON
// for each batch to `out`: percentiles of the latency in microseconds, and samples per second.
void run_benchmark(const Model& model, const Request& pool, const BenchmarkOptions& options,
                   std::FILE* out);

}  // namespace jaxrec::serving
