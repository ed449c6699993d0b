#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "runtime/pool.h"
#include "tests/check.h"

namespace chairlift::test {
namespace {

// Checks that every task runs once, on an existing worker. The counters of tasks are not atomic, so that running a task
// twice at the same time is a data race.
void check_job(int64_t num_tasks) {
  Pool& pool = Pool::get();
  const int num_threads = pool.num_threads();
  std::vector<int> done(static_cast<size_t>(num_tasks), 0);
  pool.run(num_tasks, [&](int64_t task, int worker) {
    CHECK(worker >= 0 && worker < num_threads);
    ++done[static_cast<size_t>(task)];
  });
  for (const int times : done) CHECK(times == 1);
}

// Checks the same where each thread has a range, and takes tasks of other ranges when its own is finished.
void check_ranges(int64_t num_tasks) {
  Pool& pool = Pool::get();
  std::vector<int> done(static_cast<size_t>(num_tasks), 0);
  Ranges ranges(pool, num_tasks);
  CHECK(ranges.count() == std::min<int64_t>(num_tasks, pool.num_threads()));
  pool.run(ranges.count(), [&](int64_t range, int) {
    ranges.take(range, [&](int64_t task, int64_t, bool) { ++done[static_cast<size_t>(task)]; });
  });
  for (const int times : done) CHECK(times == 1);
}

// Checks that one thread computes all ranges if the other threads never start.
void check_late_threads() {
  subject() = "ranges of threads that are late";
  Pool& pool = Pool::get();
  pool.set_num_threads(4);
  std::vector<int> done(10, 0);
  Ranges ranges(pool, 10);
  pool.run(1, [&](int64_t range, int) { ranges.take(range, [&](int64_t task, int64_t, bool) { ++done[static_cast<size_t>(task)]; }); });
  for (const int times : done) CHECK(times == 1);
}

void check_all_sizes() {
  Pool& pool = Pool::get();
  for (const int num_threads : {1, 2, 3, 8, 2, 1}) {
    pool.set_num_threads(num_threads);
    CHECK(pool.num_threads() == num_threads);
    for (const uint64_t order : {0, 1, 7, 123456789}) {
      pool.set_tile_order(order);
      subject() = std::to_string(num_threads) + " threads, order " + std::to_string(order);
      for (const int64_t num_tasks : {0, 1, 2, 3, 7, 64, 1000}) {
        check_job(num_tasks);
        check_ranges(num_tasks);
      }
    }
  }
  pool.set_tile_order(0);
}

void check_parked_workers() {
  subject() = "parked workers";
  Pool::get().set_num_threads(4);
  for (int i = 0; i < 20; ++i) {
    check_job(100);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void check_scratch() {
  subject() = "scratch memory";
  Pool& pool = Pool::get();
  pool.set_num_threads(3);
  for (const size_t num_bytes : {64, 4096, 100, 65536}) {
    pool.run(50, [&](int64_t, int worker) {
      auto* bytes = static_cast<unsigned char*>(pool.scratch(worker, num_bytes));
      CHECK(reinterpret_cast<uintptr_t>(bytes) % 64 == 0);
      bytes[0] = bytes[num_bytes - 1] = 1;
    });
  }
}

// Checks that all tasks have finished when `run` throws, and that the pool remains usable.
void check_failures() {
  subject() = "tasks that throw";
  Pool& pool = Pool::get();
  for (const int num_threads : {1, 4}) {
    pool.set_num_threads(num_threads);
    for (int64_t failing = 0; failing < 40; failing += 13) {
      std::atomic<int64_t> running{0}, begun{0};
      bool has_thrown = false;
      try {
        pool.run(40, [&](int64_t task, int) {
          ++running, ++begun;
          if (task >= failing) --running, throw std::runtime_error("no memory");
          --running;
        });
      } catch (const std::runtime_error&) {
        has_thrown = true;
      }
      CHECK(has_thrown && running == 0 && begun == 40);
      check_job(100);
    }
  }
}

// Checks several calling threads, while another thread changes the number of workers.
void check_many_callers() {
  subject() = "several callers, and a changing number of threads";
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i) Pool::get().run(40, [&](int64_t task, int) { sum += task; });
    });
  }
  for (int i = 0; i < 30; ++i) Pool::get().set_num_threads(1 + i % 5);
  for (std::thread& caller : callers) caller.join();
  CHECK(sum == 3 * 100 * (40 * 39 / 2));
}

// Checks that a child process starts its own workers.
void check_fork() {
#if !defined(__SANITIZE_THREAD__)  // it does not support a forked process that starts threads
  subject() = "a job in a forked process";
  Pool::get().set_num_threads(4);
  check_job(100);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    check_job(100);
    Pool::get().set_num_threads(2);
    check_job(100);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  check_job(100);
#endif
}

}  // namespace

void test_pool() {
  check_all_sizes();
  check_late_threads();
  check_parked_workers();
  check_scratch();
  check_failures();
  check_many_callers();
  check_fork();
}

}  // namespace chairlift::test
