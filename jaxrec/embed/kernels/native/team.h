// Threads that work through the pieces of a task, phase after phase.
#ifndef JAXREC_TEAM_H_
#define JAXREC_TEAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxrec {

// Starts a function on some other thread, soon, late or (if the others are busy) never in time.
using Starter = std::function<void(std::function<void()>)>;

// The calling thread and its helpers. The caller takes pieces itself and waits only for pieces that
// a helper has begun: if no helper ever starts, the caller does everything, so that a busy pool
// (other devices, other operations of the program) costs speed and never a deadlock.
class Team {
 public:
  Team(Starter start, int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls work(piece) for each piece in [0, count), on several threads at once, and returns when
  // all are done. What was written before is seen by all, and what they write after. Pieces that
  // take less time than waking a helper are `few`: the caller does them alone.
  template <class Work>
  void run(int64_t count, const Work& work, bool few = false) {
    run(count, few, [](const void* context, int64_t piece) {
      (*static_cast<const Work*>(context))(piece);
    }, &work);
  }

 private:
  struct Shared;
  using Call = void (*)(const void* context, int64_t piece);
  void run(int64_t count, bool few, Call call, const void* context);

  Starter start_;
  int num_threads_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace jaxrec

#endif  // JAXREC_TEAM_H_
