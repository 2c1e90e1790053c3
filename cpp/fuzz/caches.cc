// Scores the rows of several threads by a RowScorer, whose programs this file has: a score is the
// candidate times the sum of the row's context, events and request time. Build it with the
// sanitizer of threads (-DJAXREC_SANITIZE_THREADS=ON) or with those of addresses and undefined
// behaviour (-DJAXREC_SANITIZE=ON). Ends with exit code 0 where each row got its own scores and the
// caches kept to their bytes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "jaxrec/serving/error.h"
#include "row_scorer.h"

namespace {

using namespace jaxrec::serving;

constexpr int64_t kColumns = 50;  // of a token in a cache
constexpr size_t kTokenBytes = kColumns * sizeof(int32_t);

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "jaxrec_caches: %s\n", what);
  std::abort();
}

std::atomic<int64_t> living = 0;  // arrays that programs returned

// An array of int32 in memory of its own, which a freed cache overwrites.
class OwnArray final : public RuntimeArray {
 public:
  explicit OwnArray(std::vector<int32_t> values) : values_(std::move(values)) { ++living; }
  ~OwnArray() override {
    for (int32_t& value : values_) value = -1;
    --living;
  }
  const std::byte* data() const override {
    return reinterpret_cast<const std::byte*>(values_.data());
  }
  size_t bytes() const override { return values_.size() * sizeof(int32_t); }

 private:
  std::vector<int32_t> values_;
};

class SharedArray final : public RuntimeArray {
 public:
  explicit SharedArray(const HostArray& array) : data_(static_cast<const std::byte*>(array.data)) {
    for (const int64_t size : array.shape) bytes_ *= static_cast<size_t>(size);
  }
  const std::byte* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }

 private:
  const std::byte* data_;
  size_t bytes_ = sizeof(int32_t);
};

const int32_t* numbers(const RuntimeArray& array) {
  return reinterpret_cast<const int32_t*>(array.data());
}

// A ranker of one feature of context, of two slots, one of events and one of candidates, with
// history sizes of 4 and 16 events.
Manifest make_manifest() {
  Manifest manifest;
  const auto ragged = [](const char* name, std::vector<Feature> features) {
    RaggedSpec spec;
    spec.name = name;
    spec.features = std::move(features);
    return spec;
  };
  const Feature user{"user", 100, std::nullopt}, item{"item", 100, std::nullopt};
  const Feature candidate{"candidate", std::nullopt, std::nullopt};
  manifest.batch.inputs = {ragged("batch['history']", {user, item}),
                           ragged("batch['candidates']", {candidate})};
  manifest.batch.sizes = {{1, {{2, 16}, {10}}}};
  manifest.outputs = {{"output['click']", DType::kInt32, {}}};
  RankerSpec ranker;
  ranker.context = {"user"};
  for (const int64_t events : {4, 16}) {
    CacheSize size;
    size.events = events;
    size.arrays = {{"keys/0", DType::kInt32, {events, kColumns}},
                   {"lengths", DType::kInt32, {}},
                   {"newest", DType::kInt32, {}},
                   {"request", DType::kInt32, {}}};
    ranker.caches.push_back(std::move(size));
  }
  ranker.candidate_sizes = {2, 4};
  ranker.append_sizes = {1, 3};
  manifest.ranker = std::move(ranker);
  return manifest;
}

// A cache has the events in its first array, padded by zeros, and their number; `newest` is the sum
// of the context.
class SumPrograms final : public RankerPrograms {
 public:
  explicit SumPrograms(const Manifest& manifest) : manifest_(manifest) {}

  RuntimeArrays run(RankerStep step, size_t size, int64_t count, const Arguments& cache,
                    const std::vector<HostArray>& inputs) const override {
    const auto* values = static_cast<const int32_t*>(inputs[0].data);
    const auto* lengths = static_cast<const int32_t*>(inputs[1].data);
    ++runs[static_cast<size_t>(step)];
    std::this_thread::sleep_for(delay);
    if (fails) throw ArtifactError("the program is broken");
    const CacheSize& of_size = manifest_.ranker->caches[size];
    if (step == RankerStep::kScore) {
      check_cache(of_size, cache);
      require(inputs[0].shape[0] == count, "candidates have another capacity");
      int32_t sum = numbers(*cache[2])[0] + numbers(*cache[3])[0];
      for (int64_t i = 0; i < of_size.events; ++i) sum += numbers(*cache[0])[i * kColumns];
      std::vector<int32_t> scores;
      for (int64_t i = 0; i < count; ++i) scores.push_back(sum * values[i]);
      require(lengths[0] <= count, "too many candidates");
      return arrays({std::move(scores)});
    }
    std::vector<int32_t> events(static_cast<size_t>(of_size.events * kColumns));
    int32_t used = 0, context = 0, request = 0;
    if (step == RankerStep::kEncode) {
      for (int32_t i = 0; i < lengths[0]; ++i) context += values[i];
      values += 2;
      ++lengths;
      if (manifest_.ranker->request_time) request = *static_cast<const int32_t*>(inputs[2].data);
    } else {
      check_cache(of_size, cache);
      std::copy_n(numbers(*cache[0]), events.size(), events.begin());
      used = numbers(*cache[1])[0];
      context = numbers(*cache[2])[0];
      request = numbers(*cache[3])[0];
    }
    require(used + lengths[0] <= of_size.events, "too many events");
    for (int32_t i = 0; i < lengths[0]; ++i) {
      events[static_cast<size_t>((used + i) * kColumns)] = values[i];
    }
    return arrays({std::move(events), {used + lengths[0]}, {context}, {request}});
  }

  std::unique_ptr<const RuntimeArray> share(const HostArray& array) const override {
    return std::make_unique<const SharedArray>(array);
  }

  mutable std::atomic<int64_t> runs[3] = {};
  std::atomic<bool> fails = false;
  std::chrono::milliseconds delay{0};  // of each run

 private:
  static RuntimeArrays arrays(std::vector<std::vector<int32_t>> all) {
    RuntimeArrays arrays;
    for (auto& each : all) arrays.push_back(std::make_unique<const OwnArray>(std::move(each)));
    return arrays;
  }

  static void check_cache(const CacheSize& size, const Arguments& cache) {
    require(cache.size() == size.arrays.size(), "a cache has another number of arrays");
    for (size_t i = 0; i < cache.size(); ++i) {
      require(cache[i]->bytes() == size.arrays[i].bytes(), "a cache has another size");
    }
    require(numbers(*cache[1])[0] <= size.events, "a cache has too many events");
  }

  const Manifest& manifest_;
};

Row make_row(std::optional<std::string> key, Values context, Values events, Values candidates) {
  Row row;
  row.key = std::move(key);
  row.history.context = {std::move(context)};
  row.history.events = {std::move(events)};
  row.candidates = {std::move(candidates)};
  return row;
}

std::vector<int32_t> expected(const Row& row) {
  int32_t sum = row.history.request_time;
  for (const auto* values : {&row.history.context[0], &row.history.events[0]}) {
    for (const int32_t value : *values) sum += value;
  }
  std::vector<int32_t> scores;
  for (const int32_t candidate : row.candidates[0]) scores.push_back(sum * candidate);
  return scores;
}

void check_scores(RowScorer& scorer, const Row& row) {
  std::vector<std::vector<std::byte>> outputs(1);
  scorer.score(row, outputs);
  const std::vector<int32_t> scores = expected(row);
  require(outputs[0].size() == scores.size() * sizeof(int32_t), "another number of scores");
  require(scores.empty() || std::memcmp(outputs[0].data(), scores.data(), outputs[0].size()) == 0,
          "wrong scores");
}

void check_counts(const RowScorer& scorer, int64_t hits, int64_t appends, int64_t misses,
                  int64_t evictions, int64_t caches) {
  const CacheCounts counts = scorer.counts();
  require(counts.hits == hits && counts.appends == appends && counts.misses == misses &&
              counts.evictions == evictions && counts.caches == caches,
          to_metrics(counts).c_str());
}

// What happens to one user's cache, step by step.
void follow_one_user() {
  const Manifest manifest = make_manifest();
  const SumPrograms programs(manifest);
  RowScorer scorer(manifest, programs, 1 << 20);
  const Values candidates = {1, 2, 3, 4, 5, 6, 7};  // parts of 4 and 3
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3}, candidates));
  check_counts(scorer, 0, 0, 1, 0, 1);
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3}, candidates));
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3}, {}));
  check_counts(scorer, 2, 0, 1, 0, 1);
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3, 9}, candidates));  // one more event
  check_counts(scorer, 2, 1, 1, 0, 1);
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3, 9, 8, 7}, candidates));  // a larger size
  check_counts(scorer, 2, 2, 1, 0, 1);
  require(scorer.counts().bytes == int64_t(16 * kTokenBytes + 3 * 4 + 4 * (2 + 6) + 1), "bytes");
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3, 9}, candidates));  // fewer events
  check_counts(scorer, 2, 2, 2, 0, 1);
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3, 9, 5, 5, 5, 5}, candidates));  // too many
  check_counts(scorer, 2, 2, 3, 0, 1);
  check_scores(scorer, make_row("7", {3, 4}, {1, 2, 3, 9, 5, 5, 6, 5}, candidates));  // changed
  check_scores(scorer, make_row("7", {3}, {1, 2, 3, 9, 5, 5, 6, 5}, candidates));  // other context
  check_counts(scorer, 2, 2, 5, 0, 1);
  check_scores(scorer, make_row("\"7", {3}, {1, 2, 3, 9, 5, 5, 6, 5}, candidates));  // another key
  check_counts(scorer, 2, 2, 6, 0, 2);
  check_scores(scorer, make_row(std::nullopt, {3}, {1}, candidates));  // no key
  check_counts(scorer, 2, 2, 7, 0, 2);
  Row later = make_row("7", {3}, {1, 2, 3, 9, 5, 5, 6, 5}, candidates);
  later.history.request_time = 0;
  check_scores(scorer, later);
  check_counts(scorer, 3, 2, 7, 0, 2);
  check_scores(scorer, make_row("8", {}, {}, candidates));  // no events
  check_scores(scorer, make_row("8", {}, {5}, candidates));
  check_counts(scorer, 3, 3, 8, 0, 3);
}

// Caches that depend on the time of a request.
void follow_request_times() {
  Manifest manifest = make_manifest();
  manifest.ranker->request_time = "candidate";
  const SumPrograms programs(manifest);
  RowScorer scorer(manifest, programs, 1 << 20);
  for (const int32_t time : {5, 5, 6}) {
    Row row = make_row("7", {3, 4}, {1, 2, 3}, {1, time});
    row.history.request_time = time;
    check_scores(scorer, row);
  }
  check_counts(scorer, 1, 0, 2, 0, 1);
}

// The caches that were used longest ago are dropped.
void drop_the_oldest() {
  const Manifest manifest = make_manifest();
  const SumPrograms programs(manifest);
  const int64_t bytes = int64_t(4 * kTokenBytes + 3 * 4 + 4 + 1);
  RowScorer scorer(manifest, programs, static_cast<size_t>(3 * bytes));
  const auto ask = [&](const char* key) { check_scores(scorer, make_row(key, {}, {1}, {1})); };
  for (const char* key : {"1", "2", "3", "1", "4"}) ask(key);  // 2 goes
  check_counts(scorer, 1, 0, 4, 1, 3);
  require(scorer.counts().bytes == 3 * bytes, "bytes");
  ask("1");
  ask("3");
  check_counts(scorer, 3, 0, 4, 1, 3);
  ask("2");  // 4 goes
  check_counts(scorer, 3, 0, 5, 2, 3);
  // A cache of the larger size takes the space of all; one that does not fit is not kept.
  RowScorer small(manifest, programs, static_cast<size_t>(bytes));
  check_scores(small, make_row("1", {}, {1}, {1}));
  check_scores(small, make_row("2", {}, {1, 2, 3, 4, 5}, {1}));
  check_counts(small, 0, 0, 2, 0, 1);
  check_scores(small, make_row("1", {}, {1, 2, 3, 4}, {1}));  // now its history is larger
  check_counts(small, 0, 1, 2, 0, 0);
  RowScorer none(manifest, programs, 0);
  check_scores(none, make_row("1", {}, {1}, {1}));
  check_scores(none, make_row("1", {}, {1}, {1}));
  check_counts(none, 0, 0, 2, 0, 0);
}

// An error of a program leaves the caches as they were.
void fail_once() {
  const Manifest manifest = make_manifest();
  SumPrograms programs(manifest);
  RowScorer scorer(manifest, programs, 1 << 20);
  check_scores(scorer, make_row("1", {}, {1}, {1}));
  for (const Values& events : {Values{1}, Values{1, 2}, Values{2}}) {
    programs.fails = true;
    try {
      check_scores(scorer, make_row("1", {}, events, {1}));
      require(false, "no error");
    } catch (const ArtifactError&) {
    }
    programs.fails = false;
    check_scores(scorer, make_row("1", {}, {1}, {1}));
  }
  check_counts(scorer, 4, 0, 1, 0, 1);
}

// Threads that ask for one user at once encode the history once.
void ask_for_one_user(int threads) {
  const Manifest manifest = make_manifest();
  SumPrograms programs(manifest);
  programs.delay = std::chrono::milliseconds(20);  // so that the others come meanwhile
  RowScorer scorer(manifest, programs, 1 << 20);
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&] {
      for (int i = 0; i < 3; ++i) check_scores(scorer, make_row("1", {2}, {1, 2}, {1, 2, 3}));
    });
  }
  for (std::thread& thread : all) thread.join();
  check_counts(scorer, threads * 3 - 1, 0, 1, 0, 1);
  require(programs.runs[0] == 1, "a history was encoded twice");
}

// Threads ask for many users, whose histories grow and change, with space for few of them, while
// the model is replaced by others.
void ask_for_many(int threads, int rows) {
  const Manifest manifest = make_manifest();
  const SumPrograms programs(manifest);
  constexpr size_t kMost = 20000;
  std::mutex mutex;
  std::atomic<int64_t> hits = 0, appends = 0, misses = 0, evictions = 0, models = 0;
  const auto retire = [&](RowScorer* scorer) {
    const CacheCounts counts = scorer->counts();
    hits += counts.hits;
    appends += counts.appends;
    misses += counts.misses;
    evictions += counts.evictions;
    ++models;
    delete scorer;
  };
  // The last thread that scores by a model that was replaced frees it with its caches.
  const auto load = [&] {
    return std::shared_ptr<RowScorer>(new RowScorer(manifest, programs, kMost), retire);
  };
  std::shared_ptr<RowScorer> current = load();
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      std::mt19937_64 random(static_cast<uint64_t>(thread));
      for (int i = 0; i < rows; ++i) {
        std::shared_ptr<RowScorer> scorer;
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (random() % 200 == 0) current = load();
          scorer = current;
        }
        // Few users and few histories, so that all happens: hits, appends, misses, evictions.
        const auto user = random() % 12;
        Values events;
        for (auto k = static_cast<int32_t>(random() % 12); k >= 0; --k) {
          events.push_back(static_cast<int32_t>(user + events.size()));
        }
        if (random() % 20 == 0) events[0] += 1;
        Values candidates(random() % 9, static_cast<int32_t>(i));
        check_scores(*scorer, make_row(std::to_string(user), {static_cast<int32_t>(user)},
                                       std::move(events), std::move(candidates)));
        require(scorer->counts().bytes <= static_cast<int64_t>(kMost), "too many bytes");
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  current.reset();
  require(hits + appends + misses == int64_t{threads} * rows, "rows were not counted");
  require(hits > 0 && appends > 0 && misses > 0 && evictions > 0, "something did not happen");
  std::printf("%lld hits, %lld appends, %lld misses, %lld evictions, %lld models\n",
              static_cast<long long>(hits), static_cast<long long>(appends),
              static_cast<long long>(misses), static_cast<long long>(evictions),
              static_cast<long long>(models));
}

}  // namespace

int main() {
  follow_one_user();
  follow_request_times();
  drop_the_oldest();
  fail_once();
  ask_for_one_user(8);
  ask_for_many(4, 2000);
  require(living == 0, "a cache was not freed");
}
