// Answers the requests of several threads by a Batcher and by answer_lines; build it with the
// sanitizer of threads (-DJAXREC_SANITIZE_THREADS=ON). Ends with exit code 0 where each request got
// its own scores.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "answer_lines.h"
#include "jaxrec/serving/batcher.h"
#include "jaxrec/serving/error.h"

namespace {

using namespace jaxrec::serving;

constexpr int64_t kIds = 1000;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "jaxrec_threads: %s\n", what);
  std::abort();
}

// Adds the ids of each sample.
class Sum : public Predictor {
 public:
  explicit Sum(bool is_broken = false) : is_broken_(is_broken) {
    RaggedSpec ragged;
    ragged.name = "batch[0]";
    ragged.features.push_back({"item", kIds, std::nullopt});
    manifest_.batch.inputs.emplace_back(ragged);
    manifest_.batch.sizes.push_back({16, {{64}}});
    manifest_.outputs.push_back({"output", DType::kInt64, {}});
  }

  const Manifest& manifest() const override { return manifest_; }

  Scores predict(const Request& request) const override {
    if (is_broken_) throw ArtifactError("the model is broken");
    ++calls_;
    Scores scores;
    scores.samples = request.samples;
    std::vector<std::byte>& out = scores.outputs.emplace_back();
    const Column& column = std::get<std::vector<Column>>(request.inputs[0])[0];
    for (int64_t sample = 0; sample < request.samples; ++sample) {
      const auto i = static_cast<size_t>(sample);
      int64_t sum = 0;
      for (int64_t k = column.offsets[i]; k < column.offsets[i + 1]; ++k) {
        sum += column.ids[static_cast<size_t>(k)];
      }
      out.resize(out.size() + sizeof sum);
      std::memcpy(out.data() + out.size() - sizeof sum, &sum, sizeof sum);
    }
    return scores;
  }

  int64_t calls() const { return calls_; }

 private:
  const bool is_broken_;
  Manifest manifest_;
  mutable std::atomic<int64_t> calls_ = 0;
};

struct Question {
  Request request;
  std::vector<int64_t> sums;
};

Question draw(std::mt19937_64& random) {
  Question question;
  Column column;
  question.request.samples = static_cast<int64_t>(random() % 20);
  for (int64_t sample = 0; sample < question.request.samples; ++sample) {
    int64_t sum = 0;
    for (auto left = random() % 4; left > 0; --left) {
      column.ids.push_back(static_cast<int64_t>(random() % kIds));
      sum += column.ids.back();
    }
    column.offsets.push_back(static_cast<int64_t>(column.ids.size()));
    question.sums.push_back(sum);
  }
  question.request.inputs.emplace_back(std::vector<Column>{std::move(column)});
  return question;
}

std::vector<int64_t> sums_of(const Scores& scores) {
  std::vector<int64_t> sums(static_cast<size_t>(scores.samples));
  require(scores.outputs.at(0).size() == sums.size() * sizeof(int64_t), "scores have a wrong size");
  if (!sums.empty()) std::memcpy(sums.data(), scores.outputs[0].data(), scores.outputs[0].size());
  return sums;
}

// Submits requests from several threads; some find too many waiting, and try again.
void ask_at_once(const BatcherOptions& options, int clients, int requests) {
  const auto model = std::make_shared<const Sum>();
  std::atomic<int64_t> refused = 0;
  {
    Batcher batcher(model, options);
    std::vector<std::thread> threads;
    for (int client = 0; client < clients; ++client) {
      threads.emplace_back([&, client] {
        std::mt19937_64 random(static_cast<uint64_t>(client));
        std::vector<std::pair<Question, std::future<Scores>>> asked;
        for (int i = 0; i < requests; ++i) {
          Question question = draw(random);
          for (;;) {
            try {
              auto scores = batcher.submit(question.request);
              asked.emplace_back(std::move(question), std::move(scores));
              break;
            } catch (const OverloadError&) {
              ++refused;
              std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
          }
          if (random() % 8 != 0) continue;
          for (auto& [each, scores] : asked) require(sums_of(scores.get()) == each.sums, "wrong sums");
          asked.clear();
        }
        for (auto& [each, scores] : asked) require(sums_of(scores.get()) == each.sums, "wrong sums");
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::printf("%d requests in %lld calls, %lld times refused\n", clients * requests,
              static_cast<long long>(model->calls()), static_cast<long long>(refused.load()));
}

// Requests that wait are answered when the Batcher ends; a broken model breaks each of them.
void end_while_requests_wait(bool is_broken) {
  std::mt19937_64 random(7);
  std::vector<std::pair<Question, std::future<Scores>>> asked;
  {
    BatcherOptions options;
    options.max_delay = std::chrono::seconds(100);
    options.max_samples = 1 << 20;
    options.threads = 3;
    Batcher batcher(std::make_shared<const Sum>(is_broken), options);
    for (int i = 0; i < 50; ++i) {
      Question question = draw(random);
      auto scores = batcher.submit(question.request);
      asked.emplace_back(std::move(question), std::move(scores));
    }
  }
  for (auto& [each, scores] : asked) {
    try {
      require(sums_of(scores.get()) == each.sums && !is_broken, "wrong sums");
    } catch (const ArtifactError&) {
      require(is_broken, "a request failed");
    }
  }
}

// Lines are answered in their order, the wrong ones with their error.
void answer_many_lines(int lines, int samples, const BatcherOptions& options) {
  const auto model = std::make_shared<const Sum>();
  std::FILE* const in = std::tmpfile();
  std::FILE* const out = std::tmpfile();
  require(in != nullptr && out != nullptr, "no temporary file can be made");
  const auto is_wrong = [](int line) { return line % 10 == 3; };
  const auto repeated = [&](const std::string& each) {
    std::string text;
    for (int i = 0; i < samples; ++i) text += (i == 0 ? "" : ",") + each;
    return text;
  };
  for (int line = 0; line < lines; ++line) {
    const std::string ids = std::to_string(line % 900) + (is_wrong(line) ? ",-1" : ",1");
    std::fprintf(in, "{\"item\": [%s]}\n", repeated("[" + ids + "]").c_str());
  }
  std::rewind(in);
  const Decode decode = [&](std::string_view line) {
    return decode_request(model->manifest(), line);
  };
  const int64_t errors = answer_lines(model, decode, options, in, out);
  require(errors == lines / 10, "another number of lines failed");
  std::rewind(out);
  std::string text;
  for (int line = 0; line < lines; ++line) {
    text.clear();
    for (int c; (c = std::fgetc(out)) != '\n';) {
      require(c != EOF, "a line is missing");
      text += static_cast<char>(c);
    }
    const std::string expected =
        "{\"score\":[" + repeated(std::to_string(line % 900 + 1)) + "]}";
    require(is_wrong(line) ? text.rfind("{\"error\":", 0) == 0 : text == expected, "a wrong line");
  }
  std::fclose(in);
  std::fclose(out);
}

}  // namespace

int main() {
  BatcherOptions options;
  options.max_delay = std::chrono::microseconds(200);
  options.max_samples = 32;
  options.threads = 3;
  ask_at_once(options, 4, 500);
  options.max_queued = 40;
  options.max_delay = std::chrono::microseconds(0);
  ask_at_once(options, 4, 500);
  end_while_requests_wait(false);
  end_while_requests_wait(true);
  options.max_samples = 8;
  options.max_delay = std::chrono::microseconds(100);
  answer_many_lines(3000, 1, options);
  // More samples wait than a Batcher takes by default.
  options.max_samples = 1 << 20;
  options.max_delay = std::chrono::milliseconds(300);
  answer_many_lines(700, 100, options);
}
