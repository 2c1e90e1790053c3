// Latency and throughput of a model in this process.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "jaxrec/serving/batcher.h"

namespace jaxrec::serving {

struct BenchmarkOptions {
  std::vector<int64_t> batches = {1, 64, 1024};  // samples of a request
  double seconds = 5;                            // for each batch
  int threads = 1;                               // that predict at once
  // Rate of the requests that are due at fixed times, as a share of the rate of requests that wait
  // for each other; 0: none are.
  double open_share = 0;
  BatcherOptions batcher;  // of requests that are due at fixed times
};

// Returns valid requests: ids are drawn evenly from those of each table. Rows of a ranker are of
// different users and have as many events as the largest history size, and 512 candidates where it
// takes so many.
Request draw_request(const Manifest& manifest);

// Predicts samples of `pool`, one request after the other in each thread, and prints a line of JSON
// for each batch to `out`: percentiles of the latency in microseconds, samples per second, and the
// processor time of a request, of all threads of the process, in microseconds.
//
// With `open_share`, requests are then submitted to a Batcher at fixed times, and the line has the
// percentiles of the time from when a request is due to its scores, as "open_p50_us" and
// "open_p99_us", and the rate.
void run_benchmark(std::shared_ptr<const Predictor> model, const Request& pool,
                   const BenchmarkOptions& options, std::FILE* out);

}  // namespace jaxrec::serving
