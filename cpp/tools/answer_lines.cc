#include "answer_lines.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <future>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "jaxrec/serving/error.h"
#include "json_string.h"

namespace jaxrec::serving {
namespace {

// Requests that are read before the first of them is answered: what bounds the memory.
constexpr size_t kMostUnanswered = 1024;
constexpr size_t kMostLineBytes = size_t{64} << 20;

// Reads a line without its end; false at the end of the file. A line that is too long is read to
// its end, and `is_too_long` set.
bool read_line(std::FILE* in, std::string& line, bool& is_too_long) {
  line.clear();
  is_too_long = false;
  int c;
  while ((c = ::getc_unlocked(in)) != EOF && c != '\n') {
    if (line.size() < kMostLineBytes) {
      line += static_cast<char>(c);
    } else {
      is_too_long = true;
    }
  }
  return c != EOF || !line.empty();
}

std::future<Scores> failed(const std::string& message) {
  std::promise<Scores> promise;
  promise.set_exception(std::make_exception_ptr(RequestError(message)));
  return promise.get_future();
}

// Answers that are written in order by a thread of their own.
class Answers {
 public:
  Answers(const Manifest& manifest, std::FILE* out)
      : manifest_(manifest), out_(out), thread_([this] { write_all(); }) {}

  // Waits while too many answers are outstanding.
  void add(std::future<Scores> scores) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return waiting_.size() < kMostUnanswered; });
    waiting_.push_back(std::move(scores));
    changed_.notify_all();
  }

  // Writes the rest; returns the number of errors.
  int64_t finish() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_complete_ = true;
    }
    changed_.notify_all();
    thread_.join();
    return errors_;
  }

 private:
  void write_all() {
    for (;;) {
      std::future<Scores> scores;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !waiting_.empty() || is_complete_; });
        if (waiting_.empty()) return;
        scores = std::move(waiting_.front());
        waiting_.pop_front();
      }
      changed_.notify_all();
      write(scores);
    }
  }

  void write(std::future<Scores>& scores) {
    std::string line;
    try {
      line = to_json(manifest_, scores.get());
    } catch (const std::exception& error) {
      line = "{\"error\":" + json_string(error.what()) + "}";
      ++errors_;
    }
    line += '\n';
    if (std::fwrite(line.data(), 1, line.size(), out_) != line.size() || std::fflush(out_) != 0) {
      std::fprintf(stderr, "jaxrec_predict: the scores cannot be written\n");
      std::_Exit(1);  // requests are still under way
    }
  }

  const Manifest& manifest_;
  std::FILE* const out_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::future<Scores>> waiting_;
  bool is_complete_ = false;
  int64_t errors_ = 0;
  std::thread thread_;
};

}  // namespace

int64_t answer_lines(std::shared_ptr<const Predictor> model, const Decode& decode,
                     BatcherOptions options, std::FILE* in, std::FILE* out) {
  options.max_queued = std::numeric_limits<int64_t>::max();  // kMostUnanswered bounds what waits
  Answers answers(model->manifest(), out);
  Batcher batcher(model, options);
  std::string line;
  bool is_too_long = false;
  while (read_line(in, line, is_too_long)) {
    try {
      if (is_too_long) throw RequestError("the request has more than 64 MiB");
      answers.add(batcher.submit(decode(line)));
    } catch (const std::exception& error) {
      answers.add(failed(error.what()));
    }
  }
  return answers.finish();
}

}  // namespace jaxrec::serving
