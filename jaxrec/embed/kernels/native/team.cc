#include "team.h"

#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxrec {
namespace {

// How long a helper looks out for the next phase before it leaves, and the caller for the end of a
// phase before it sleeps.
constexpr auto kPatience = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls done() until it holds or patience ends; whether it holds.
template <class Done>
bool spin(const Done& done) {
  auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
    if (std::chrono::steady_clock::now() - start > kPatience) return done();
  }
}

// Subnormal numbers are zeros, as in XLA's own code, on whatever thread a piece runs: the results
// must not depend on it.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  FlushSubnormals() {}
#endif
};

uint32_t total(uint64_t work) { return static_cast<uint32_t>(work >> 32); }
uint32_t next(uint64_t work) { return static_cast<uint32_t>(work); }
bool has_piece(uint64_t work) { return next(work) < total(work); }

}  // namespace

struct Team::Shared {
  // Pieces of the phase and how many are taken, in one word: a helper that comes late and takes a
  // piece of a phase that is over sees just that and has touched nothing else.
  std::atomic<uint64_t> work{0};
  std::atomic<uint32_t> done{0};
  std::atomic<bool> closed{false};
  std::atomic<int> helpers{0};
  Call call = nullptr;
  const void* context = nullptr;
  std::mutex mutex;
  std::condition_variable all_done;

  // Takes pieces until none is left.
  void take() {
    while (has_piece(work.load(std::memory_order_acquire))) {
      uint64_t ticket = work.fetch_add(1, std::memory_order_acq_rel);
      if (!has_piece(ticket)) return;
      call(context, next(ticket));
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == total(ticket)) {
        // Under the lock, lest the caller goes to sleep between looking and waiting.
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_one();
      }
    }
  }

  void help() {
    FlushSubnormals flush;
    auto is_wanted = [this] {
      return closed.load(std::memory_order_relaxed) ||
             has_piece(work.load(std::memory_order_relaxed));
    };
    do take();
    while (!closed.load(std::memory_order_relaxed) && spin(is_wanted));
    helpers.fetch_sub(1, std::memory_order_relaxed);
  }
};

Team::Team(Starter start, int num_threads)
    : start_(std::move(start)), num_threads_(num_threads), shared_(std::make_shared<Shared>()) {}

Team::~Team() { shared_->closed.store(true, std::memory_order_relaxed); }

void Team::run(int64_t count, bool few, Call call, const void* context) {
  FlushSubnormals flush;
  Shared& shared = *shared_;
  if (num_threads_ == 1 || count <= 1 || few) {
    for (int64_t piece = 0; piece < count; ++piece) call(context, piece);
    return;
  }
  shared.call = call;
  shared.context = context;
  shared.done.store(0, std::memory_order_relaxed);
  shared.work.store(static_cast<uint64_t>(count) << 32, std::memory_order_release);

  int64_t wanted = count < num_threads_ ? count : num_threads_;
  int missing = static_cast<int>(wanted) - 1 - shared.helpers.load(std::memory_order_relaxed);
  for (int i = 0; i < missing; ++i) {
    shared.helpers.fetch_add(1, std::memory_order_relaxed);
    start_([shared = shared_] { shared->help(); });
  }
  shared.take();
  auto is_done = [&] {
    return shared.done.load(std::memory_order_acquire) == static_cast<uint32_t>(count);
  };
  if (!spin(is_done)) {
    std::unique_lock<std::mutex> lock(shared.mutex);
    shared.all_done.wait(lock, is_done);
  }
}

}  // namespace jaxrec
