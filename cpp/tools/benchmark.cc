#include "benchmark.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <future>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace jaxrec::serving {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Number of ids of each sample: `mean` of them, or any number with this mean.
struct Length {
  int64_t mean;
  bool is_fixed;
};

// A length that leaves the capacity of the largest batch a margin.
Length usual_length(const Feature& feature, int64_t capacity, int64_t samples) {
  const int64_t mean = std::max<int64_t>(1, capacity * 2 / 3 / samples);
  return {feature.fixed.value_or(mean), feature.fixed || mean == 1};
}

// The length of histories that fill the largest history size, or of candidates.
Length row_length(int64_t capacity, bool is_candidates) {
  constexpr int64_t kCandidates = 512;
  return {is_candidates ? std::min(capacity, kCandidates) : capacity, true};
}

Column draw_column(const Feature& feature, const Length& length, int64_t samples, bool is_weighted,
                   std::mt19937_64& random) {
  Column column;
  std::uniform_int_distribution<int64_t> id(0, feature.bound() - 1);
  std::uniform_int_distribution<int64_t> any(0, 2 * length.mean);
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t count = length.is_fixed ? length.mean : any(random);
    for (int64_t i = 0; i < count; ++i) column.ids.push_back(id(random));
    column.offsets.push_back(static_cast<int64_t>(column.ids.size()));
  }
  if (is_weighted) column.weights.assign(column.ids.size(), 1.0f);
  return column;
}

// The requests of one batch size, cut from the pool, repeated where it has too few samples.
std::vector<Request> requests_of(const BatchSpec& spec, const Request& pool, int64_t samples) {
  std::vector<const Request*> copies(static_cast<size_t>(samples / pool.samples + 1), &pool);
  const Request whole = join(spec, copies);
  constexpr int64_t kMost = 4096;
  std::vector<Request> requests;
  for (int64_t start = 0; start + samples <= whole.samples && start < kMost * samples;
       start += samples) {
    requests.push_back(slice(spec, whole, start, start + samples));
  }
  return requests;
}

double percentile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1))];
}

}  // namespace

Request draw_request(const Manifest& manifest) {
  const BatchSpec& spec = manifest.batch;
  std::mt19937_64 random(0);
  Request request;
  const int64_t samples = manifest.ranker ? 16 : 16384;
  request.samples = samples;
  for (int64_t user = 0; manifest.ranker && user < samples; ++user) {
    request.cache_keys.emplace_back(std::to_string(user));
  }
  const BatchSize& largest = spec.sizes.back();
  size_t number = 0;
  for (const InputSpec& input : spec.inputs) {
    if (const auto* array = std::get_if<ArraySpec>(&input)) {
      ArrayValues values(array->bytes() * static_cast<size_t>(samples));
      if (array->dtype == DType::kFloat32) {
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < values.size(); i += sizeof(float)) {
          const float value = normal(random);
          std::memcpy(values.data() + i, &value, sizeof value);
        }
      }
      request.inputs.emplace_back(std::move(values));
      continue;
    }
    const auto& ragged = std::get<RaggedSpec>(input);
    std::vector<Column> columns;
    for (size_t k = 0; k < ragged.features.size(); ++k) {
      const Feature& feature = ragged.features[k];
      const int64_t capacity = largest.capacities[number][k];
      const Length length = manifest.ranker ? row_length(capacity, number == 1)
                                            : usual_length(feature, capacity, largest.samples);
      columns.push_back(draw_column(feature, length, samples, ragged.is_weighted, random));
    }
    request.inputs.emplace_back(std::move(columns));
    ++number;
  }
  return request;
}

namespace {

struct Latencies {
  std::vector<double> sorted;  // in microseconds
  double requests_per_s = 0;
  double processor_us = 0;     // of a request
};

// Processor time of all threads of this process, in seconds.
double processor_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

// Predicts one request after the other in each thread.
Latencies closed_loop(const Predictor& model, const std::vector<Request>& requests,
                      const BenchmarkOptions& options) {
  std::vector<double> latencies;
  std::mutex mutex;
  std::exception_ptr failure;
  const double processor_start = processor_seconds();
  const Clock::time_point start = Clock::now();
  const auto work = [&](size_t first) {
    std::vector<double> own;
    try {
      for (size_t i = first; own.empty() || seconds_since(start) < options.seconds; ++i) {
        const Clock::time_point begin = Clock::now();
        model.predict(requests[i % requests.size()]);
        own.push_back(seconds_since(begin) * 1e6);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    latencies.insert(latencies.end(), own.begin(), own.end());
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < options.threads; ++i) threads.emplace_back(work, static_cast<size_t>(i) * 97);
  work(0);
  for (std::thread& thread : threads) thread.join();
  const double elapsed = seconds_since(start);
  const double processor = processor_seconds() - processor_start;
  if (failure) std::rethrow_exception(failure);
  std::sort(latencies.begin(), latencies.end());
  const auto requests_done = static_cast<double>(latencies.size());
  return {std::move(latencies), requests_done / elapsed, processor * 1e6 / requests_done};
}

// Submits requests that are due at fixed times.
Latencies open_loop(std::shared_ptr<const Predictor> model, const std::vector<Request>& requests,
                    double rate, const BenchmarkOptions& options) {
  BatcherOptions of_batcher = options.batcher;
  of_batcher.threads = options.threads;
  of_batcher.max_queued = std::numeric_limits<int64_t>::max();
  Batcher batcher(std::move(model), of_batcher);
  struct Sent {
    Clock::time_point due;
    std::future<Scores> scores;
  };
  std::deque<Sent> sent;
  std::mutex mutex;
  std::condition_variable changed;
  const auto count = std::max<size_t>(20, static_cast<size_t>(rate * options.seconds));
  Latencies latencies;
  std::exception_ptr failure;
  // Takes the scores in the order of the requests, which is that of their batches.
  std::thread receiver([&] {
    for (size_t i = 0; i < count; ++i) {
      Sent each;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !sent.empty(); });
        each = std::move(sent.front());
        sent.pop_front();
      }
      try {
        each.scores.get();
      } catch (...) {
        failure = std::current_exception();
      }
      latencies.sorted.push_back(seconds_since(each.due) * 1e6);
    }
  });
  const Clock::time_point start = Clock::now();
  for (size_t i = 0; i < count; ++i) {
    const auto due = start + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(static_cast<double>(i) / rate));
    std::this_thread::sleep_until(due);
    std::future<Scores> scores = batcher.submit(requests[i % requests.size()]);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      sent.push_back({due, std::move(scores)});
    }
    changed.notify_one();
  }
  receiver.join();
  if (failure) std::rethrow_exception(failure);
  std::sort(latencies.sorted.begin(), latencies.sorted.end());
  latencies.requests_per_s = rate;
  return latencies;
}

}  // namespace

void run_benchmark(std::shared_ptr<const Predictor> model, const Request& pool,
                   const BenchmarkOptions& options, std::FILE* out) {
  for (const int64_t samples : options.batches) {
    const std::vector<Request> requests = requests_of(model->manifest().batch, pool, samples);
    for (size_t i = 0; i < std::min<size_t>(requests.size(), 20); ++i) {
      model->predict(requests[i]);  // reads what is read first into the caches
    }
    const Latencies closed = closed_loop(*model, requests, options);
    std::fprintf(out,
                 "{\"batch\":%lld,\"threads\":%d,\"requests\":%zu,\"p50_us\":%.1f,\"p99_us\":%.1f,"
                 "\"samples_per_s\":%.0f,\"processor_us\":%.1f",
                 static_cast<long long>(samples), options.threads, closed.sorted.size(),
                 percentile(closed.sorted, 0.5), percentile(closed.sorted, 0.99),
                 closed.requests_per_s * static_cast<double>(samples), closed.processor_us);
    if (options.open_share > 0) {
      const double rate = options.open_share * closed.requests_per_s;
      const Latencies open = open_loop(model, requests, rate, options);
      std::fprintf(out, ",\"open_per_s\":%.1f,\"open_p50_us\":%.1f,\"open_p99_us\":%.1f",
                   open.requests_per_s, percentile(open.sorted, 0.5),
                   percentile(open.sorted, 0.99));
    }
    std::fputs("}\n", out);
    std::fflush(out);
  }
}

}  // namespace jaxrec::serving
