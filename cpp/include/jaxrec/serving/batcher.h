// Joins the requests of several threads to batches, since one call for many samples costs less
// than many calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "jaxrec/serving/predictor.h"

namespace jaxrec::serving {

struct BatcherOptions {
  int64_t max_samples = 1024;                // a batch holds no more, but for one larger request
  std::chrono::microseconds max_delay{2000};  // a request waits no longer for others
  int64_t max_queued = 65536;                 // samples that may wait
  int threads = 1;                            // batches that are predicted at once
};

class Batcher {
 public:
  Batcher(std::shared_ptr<const Predictor> model, const BatcherOptions& options);

  // Answers the requests that wait.
  ~Batcher();

  // Returns the scores of a request as soon as they are there.
  //
  // Throws RequestError where the model does not take the request, and OverloadError where
  // `max_queued` samples wait.
  std::future<Scores> submit(Request request);

 private:
  using Clock = std::chrono::steady_clock;
  struct Waiting {
    Request request;
    Clock::time_point arrival;
    std::promise<Scores> scores;
  };

  void work();
  std::vector<Waiting> next_batch();
  void answer(std::vector<Waiting>& batch) const;

  const std::shared_ptr<const Predictor> model_;
  const BatcherOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> queue_;
  int64_t queued_ = 0;  // samples
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace jaxrec::serving
