// Answers requests by an exported model: JSON lines in, JSON lines out; or measures it.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "answer_lines.h"
#include "benchmark.h"
#include "jaxrec/serving/error.h"
#include "jaxrec/serving/model.h"
#include "jaxrec/serving/ranker.h"
#include "metrics_file.h"

namespace {

using namespace jaxrec::serving;

struct Options {
  std::string model;
  RuntimeOptions runtime;
  bool verify = true;
  bool is_encoded = false;
  double cache_mb = 1024;
  std::string metrics;
  std::string input;
  std::string output;
  BatcherOptions batcher;
  int64_t max_delay_us = 2000;
  bool is_benchmark = false;
  BenchmarkOptions benchmark;
  int threads = 1;
};

void add_options(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("MODEL", options.model, "Folder that `jaxrec export` wrote")->required();
  app.add_option("--plugin", options.runtime.plugin, "PJRT plugin for CPUs, a shared library")
      ->envname("JAXREC_PJRT_PLUGIN");
  app.add_option("--native-library", options.runtime.native_library,
                 "libjaxrec.so, which holds the lookups of tables")
      ->envname("JAXREC_NATIVE_LIBRARY");
  app.add_flag("!--no-verify", options.verify, "Compare no checksums of files");
  app.add_flag("--encoded", options.is_encoded,
               "Requests of a model with an encoder of raw columns have its inputs: row indices, "
               "and numbers after their transforms as input0");
  app.add_option("--cache-mb", options.cache_mb,
                 "Ranker: largest total size of the encoded histories, of which those that were "
                 "used last are kept; 0: none are kept")
      ->check(CLI::Range(0.0, 1e9));
  app.add_option("--metrics", options.metrics,
                 "Ranker: file that the metrics of the caches are written to, in Prometheus' text "
                 "format, every five seconds and at the end");
  app.add_option("--input", options.input, "File with a request in JSON on each line; else stdin");
  app.add_option("--output", options.output, "File that answers are written to; else stdout");
  app.add_option("--max-batch", options.batcher.max_samples,
                 "Most samples of requests that are joined")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  app.add_option("--max-delay-us", options.max_delay_us,
                 "Longest time that a request waits for others, in microseconds")
      ->check(CLI::Range(int64_t{0}, int64_t{60'000'000}));
  app.add_option("--threads", options.threads, "Threads that predict")
      ->check(CLI::Range(1, 1024));
  app.add_flag("--benchmark", options.is_benchmark,
               "Measure requests of --input, or random ones, in a loop");
  app.add_option("--batch", options.benchmark.batches, "Benchmark: samples of a request")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  app.add_option("--seconds", options.benchmark.seconds, "Benchmark: time for each batch")
      ->check(CLI::Range(0.01, 86400.0));
  app.add_option("--open-share", options.benchmark.open_share,
                 "Benchmark: submit requests at fixed times, too, at this share of the rate of "
                 "requests that wait for each other; 0: do not")
      ->check(CLI::Range(0.0, 1.0));
}

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

File open_file(const std::string& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode));
  if (file == nullptr) throw std::runtime_error(path + ": " + std::strerror(errno));
  return file;
}

// Returns the samples of all requests of a file.
Request read_requests(const BatchSpec& spec, const Decode& decode, const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": " + std::strerror(errno));
  std::vector<Request> requests;
  for (std::string line; std::getline(file, line);) {
    requests.push_back(decode(line));
  }
  std::vector<const Request*> all;
  for (const Request& each : requests) all.push_back(&each);
  Request pool = join(spec, all);
  if (pool.samples == 0) throw std::runtime_error(path + " has no samples");
  return pool;
}

// Answers the requests of the input, or measures.
int answer(std::shared_ptr<const Predictor> model, const Decode& decode, Options& options) {
  const File output = options.output.empty() ? nullptr : open_file(options.output, "w");
  std::FILE* const out = output == nullptr ? stdout : output.get();
  options.batcher.max_delay = std::chrono::microseconds(options.max_delay_us);
  options.batcher.threads = options.threads;
  if (options.is_benchmark) {
    const Request pool = options.input.empty()
                             ? draw_request(model->manifest())
                             : read_requests(model->manifest().batch, decode, options.input);
    options.benchmark.threads = options.threads;
    options.benchmark.batcher = options.batcher;
    run_benchmark(model, pool, options.benchmark, out);
    return 0;
  }
  const File input = options.input.empty() ? nullptr : open_file(options.input, "r");
  const int64_t errors =
      answer_lines(model, decode, options.batcher, input == nullptr ? stdin : input.get(), out);
  if (errors == 0) return 0;
  std::fprintf(stderr, "jaxrec_predict: %lld requests failed; their lines say why\n",
               static_cast<long long>(errors));
  return 1;
}

int run(Options& options) {
  const auto runtime = Runtime::open(options.runtime);
  if (read_manifest(options.model).ranker) {
    constexpr double kMegabyte = 1 << 20;
    const auto cache_bytes = static_cast<size_t>(options.cache_mb * kMegabyte);
    const auto ranker = Ranker::load(options.model, runtime, {cache_bytes, options.verify});
    std::optional<MetricsFile> metrics;
    if (!options.metrics.empty()) {
      metrics.emplace(options.metrics, [&] { return to_metrics(ranker->cache_counts()); });
    }
    ranker->warm_up();
    // A program computes for one row: requests gain nothing by waiting for others.
    options.batcher.max_samples = 1;
    const Decode decode = [&](std::string_view line) {
      return decode_request(ranker->manifest(), line);
    };
    return answer(ranker, decode, options);
  }
  if (!options.metrics.empty()) {
    throw std::runtime_error("--metrics are those of a ranker's caches, and " + options.model +
                             " is another model");
  }
  const auto model = Model::load(options.model, runtime, options.verify);
  model->warm_up();
  const Decode decode = [&](std::string_view line) {
    return options.is_encoded ? decode_request(model->manifest(), line) : model->decode(line);
  };
  return answer(model, decode, options);
}

}  // namespace

int main(int argc, char** argv) {
  // XLA's log tells users nothing.
  ::setenv("TF_CPP_MIN_LOG_LEVEL", "2", 0);
  Options options;
  CLI::App app("Predicts with a model that `jaxrec export` wrote, without Python.");
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "jaxrec_predict: %s\n", error.what());
    return 1;
  }
}
