// A thread pool whose threads take tasks from an atomic counter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/reusable_memory.h"

namespace chairlift {

// Runs one job at a time: `run` calls body(task, worker) once for each task, on the calling thread (worker 0) and on
// the workers, and returns when all tasks are done. Threads take tasks in ascending order, so results must not depend
// on which thread computes a task. Workers spin for kSpin after a job, then park. If tasks throw, `run` throws the
// first exception once all tasks are done.
class Pool {
 public:
  static Pool& get();

  // Sets the number of threads that compute, including the caller: 1 to kMaxThreads.
  void set_num_threads(int num_threads);
  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // Changes the order of tasks, for tests; 0 is the ascending order.
  void set_tile_order(uint64_t seed) { order_seed_ = seed; }

  template <typename Body>
  void run(int64_t num_tasks, const Body& body) {
    run_job({[](const void* self, int64_t task, int worker) { (*static_cast<const Body*>(self))(task, worker); }, &body},
            num_tasks);
  }

  // The scratch memory of a worker, see ReusableMemory. Valid until the next call for the same worker.
  void* scratch(int worker, size_t num_bytes) { return scratch_[static_cast<size_t>(worker)].get(num_bytes); }

  // The task at this place in the order of set_tile_order.
  int64_t place_of(int64_t task, int64_t num_tasks) const;

  static constexpr int kMaxThreads = 256;

 private:
  struct Job {
    void (*call)(const void* self, int64_t task, int worker);
    const void* self;
  };

  Pool();
  void run_job(Job job, int64_t num_tasks);
  void take_tasks(uint32_t generation, int worker);
  void run_task(Job job, int64_t place, int worker);
  void rethrow_failure();
  void work(int worker);
  void start_workers();
  void stop_workers();
  void reset_after_fork();

  // The counter of a job: its generation in the upper half, the next task in the lower half. Taking a task is a
  // compare-and-swap on both, so a worker that wakes up late cannot take a task of a job whose fields it has not read.
  // kClosed prevents taking tasks while the fields below change.
  static constexpr uint32_t kClosed = 0xffffffffu;
  alignas(64) std::atomic<uint64_t> counter_{kClosed};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<void (*)(const void*, int64_t, int)> call_{nullptr};
  std::atomic<const void*> self_{nullptr};
  std::atomic<int64_t> num_tasks_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> order_seed_{0};

  std::mutex job_mutex_;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::mutex park_mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
  std::vector<ReusableMemory> scratch_;
  std::atomic<int> num_threads_{1};
};

// Tasks that read memory in order. Each thread has a range of consecutive tasks, so that its reads continue where the
// hardware prefetches, and takes the remaining tasks of other ranges at the end. The ranges are the tasks of Pool::run,
// and its caller constructs them.
class Ranges {
 public:
  Ranges(const Pool& pool, int64_t num_tasks) : Ranges(pool, num_tasks, pool.num_threads()) {}
  Ranges(const Pool& pool, int64_t num_tasks, int num_threads)
      : pool_(pool), num_tasks_(num_tasks), count_(num_tasks < num_threads ? num_tasks : num_threads) {
    for (int64_t i = 0; i < count_; ++i) next_[i].task.store(first(i), std::memory_order_relaxed);
  }

  int64_t count() const { return count_; }
  int64_t first(int64_t range) const { return num_tasks_ * range / count_; }

  // Calls body(task, range of the task, whether it is the last of that range) for each task of the range that is not
  // taken, then for those of the other ranges.
  template <typename Body>
  void take(int64_t range, const Body& body) {
    for (int64_t i = 0; i < count_; ++i, range = (range + 1) % count_)
      for (int64_t task; (task = next_[range].task.fetch_add(1, std::memory_order_relaxed)) < first(range + 1);)
        body(pool_.place_of(task, num_tasks_), range, task + 1 == first(range + 1));
  }

 private:
  struct alignas(64) Next {
    std::atomic<int64_t> task;
  };

  const Pool& pool_;
  int64_t num_tasks_, count_;
  Next next_[Pool::kMaxThreads];
};

// Waits for a condition that another thread is about to make true.
void spin_until_slow(const void* self, bool (*done)(const void*));
template <typename Done>
void spin_until(const Done& done) {
  if (!done()) spin_until_slow(&done, [](const void* self) { return (*static_cast<const Done*>(self))(); });
}

}  // namespace chairlift
