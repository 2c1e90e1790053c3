#include "benchmark.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <thread>

namespace jaxrec::serving {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Mean number of ids of a sample that leaves the capacity of the largest batch a margin.
int64_t usual_ids(const Feature& feature, int64_t capacity, int64_t samples) {
  return feature.fixed.value_or(std::max<int64_t>(1, capacity * 2 / 3 / samples));
}

Column draw_column(const Feature& feature, int64_t mean, int64_t samples, bool is_weighted,
                   std::mt19937_64& random) {
  Column column;
  std::uniform_int_distribution<int64_t> id(0, feature.bound() - 1);
  std::uniform_int_distribution<int64_t> any(0, 2 * mean);
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int64_t count = feature.fixed || mean == 1 ? mean : any(random);
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

Request draw_request(const BatchSpec& spec, int64_t samples) {
  std::mt19937_64 random(0);
  Request request;
  request.samples = samples;
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
      const int64_t mean = usual_ids(feature, largest.capacities[number][k], largest.samples);
      columns.push_back(draw_column(feature, mean, samples, ragged.is_weighted, random));
    }
    request.inputs.emplace_back(std::move(columns));
    ++number;
  }
  return request;
}

void run_benchmark(const Model& model, const Request& pool, const BenchmarkOptions& options,
                   std::FILE* out) {
  for (const int64_t samples : options.batches) {
    const std::vector<Request> requests = requests_of(model.manifest().batch, pool, samples);
    for (size_t i = 0; i < std::min<size_t>(requests.size(), 20); ++i) {
      model.predict(requests[i]);  // compiles the programs
    }
    std::vector<double> latencies;
    std::mutex mutex;
    std::exception_ptr failure;
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
    if (failure) std::rethrow_exception(failure);
    std::sort(latencies.begin(), latencies.end());
    std::fprintf(out,
                 "{\"batch\":%lld,\"threads\":%d,\"requests\":%zu,\"p50_us\":%.1f,\"p99_us\":%.1f,"
                 "\"samples_per_s\":%.0f}\n",
                 static_cast<long long>(samples), options.threads, latencies.size(),
                 percentile(latencies, 0.5), percentile(latencies, 0.99),
                 static_cast<double>(latencies.size()) * static_cast<double>(samples) / elapsed);
    std::fflush(out);
  }
}

}  // namespace jaxrec::serving
