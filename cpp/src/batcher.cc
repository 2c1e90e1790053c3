#include "jaxrec/serving/batcher.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "jaxrec/serving/error.h"

namespace jaxrec::serving {

Batcher::Batcher(std::shared_ptr<const Predictor> model, const BatcherOptions& options)
    : model_(std::move(model)), options_(options) {
  for (int i = 0; i < std::max(1, options_.threads); ++i) threads_.emplace_back([this] { work(); });
}

Batcher::~Batcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::future<Scores> Batcher::submit(Request request) {
  check_request(model_->manifest(), request);
  Waiting waiting{std::move(request), Clock::now(), {}};
  std::future<Scores> scores = waiting.scores.get_future();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queued_ > 0 && queued_ + waiting.request.samples > options_.max_queued) {
      throw OverloadError(std::to_string(queued_) + " samples wait, and no more than " +
                          std::to_string(options_.max_queued) + " may; try again later");
    }
    queued_ += waiting.request.samples;
    queue_.push_back(std::move(waiting));
  }
  changed_.notify_all();
  return scores;
}

void Batcher::work() {
  for (;;) {
    std::vector<Waiting> batch = next_batch();
    if (batch.empty()) return;
    answer(batch);
  }
}

// Waits for requests, and then for more until there are enough or the first has waited long enough.
std::vector<Batcher::Waiting> Batcher::next_batch() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty() || is_closing_; });
    if (queue_.empty()) return {};
    const auto deadline = queue_.front().arrival + options_.max_delay;
    changed_.wait_until(lock, deadline, [this] {
      return queue_.empty() || queued_ >= options_.max_samples || is_closing_;
    });
    if (queue_.empty()) continue;  // another thread took them
    std::vector<Waiting> batch;
    int64_t samples = 0;
    while (!queue_.empty()) {
      const int64_t more = queue_.front().request.samples;
      if (!batch.empty() && samples + more > options_.max_samples) break;
      samples += more;
      batch.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    queued_ -= samples;
    return batch;
  }
}

void Batcher::answer(std::vector<Waiting>& batch) const {
  const Manifest& manifest = model_->manifest();
  size_t answered = 0;
  try {
    if (batch.size() == 1) {
      batch[0].scores.set_value(model_->predict(batch[0].request));
      return;
    }
    std::vector<const Request*> requests;
    for (const Waiting& each : batch) requests.push_back(&each.request);
    const Scores scores = model_->predict(join(manifest.batch, requests));
    int64_t start = 0;
    for (Waiting& each : batch) {
      const int64_t stop = start + each.request.samples;
      Scores part = slice(manifest, scores, start, stop);
      ++answered;
      each.scores.set_value(std::move(part));
      start = stop;
    }
  } catch (...) {
    for (; answered < batch.size(); ++answered) {
      batch[answered].scores.set_exception(std::current_exception());
    }
  }
}

}  // namespace jaxrec::serving
