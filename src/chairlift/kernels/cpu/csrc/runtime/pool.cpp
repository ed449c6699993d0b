#include "runtime/pool.h"

#include <pthread.h>

#include <chrono>
#include <new>
#include <numeric>
#include <utility>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace chairlift {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

uint32_t generation_of(uint64_t counter) { return static_cast<uint32_t>(counter >> 32); }
uint64_t counter_at(uint32_t generation, uint32_t next) { return static_cast<uint64_t>(generation) << 32 | next; }

}  // namespace

void spin_until_slow(const void* self, bool (*done)(const void*)) {
  const auto deadline = Clock::now() + kSpin;
  bool patient = true;
  while (!done(self)) {
    pause();
    if (patient && Clock::now() > deadline) patient = false;
    if (!patient) std::this_thread::yield();
  }
}

Pool& Pool::get() {
  static Pool* pool = new Pool;  // never destroyed, because workers may outlive static destruction
  return *pool;
}

Pool::Pool() : scratch_(kMaxThreads) {
  pthread_atfork(nullptr, nullptr, [] { Pool::get().reset_after_fork(); });
}

// Resets the pool in a child process, which has only the thread that called fork.
void Pool::reset_after_fork() {
  new (&threads_) std::vector<std::thread>;
  new (&job_mutex_) std::mutex;
  new (&failure_mutex_) std::mutex;
  failure_ = nullptr;
  new (&park_mutex_) std::mutex;
  new (&wake_) std::condition_variable;
  parked_ = 0;
}

void Pool::set_num_threads(int num_threads) {
  const std::lock_guard<std::mutex> lock(job_mutex_);
  if (num_threads == num_threads_) return;
  stop_workers();
  num_threads_ = num_threads;
}

void Pool::start_workers() {
  while (static_cast<int>(threads_.size()) < num_threads_ - 1) {
    const int worker = static_cast<int>(threads_.size()) + 1;
    threads_.emplace_back([this, worker] { work(worker); });
  }
}

void Pool::stop_workers() {
  {
    const std::lock_guard<std::mutex> lock(park_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  stopping_ = false;
}

void Pool::run_job(Job job, int64_t num_tasks) {
  if (num_tasks <= 0) return;
  const std::lock_guard<std::mutex> lock(job_mutex_);
  if (num_tasks == 1 || num_threads_ == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) run_task(job, place_of(task, num_tasks), 0);
    return rethrow_failure();
  }
  start_workers();
  const uint32_t generation = generation_of(counter_.load(std::memory_order_relaxed)) + 1;
  call_.store(job.call, std::memory_order_relaxed);
  self_.store(job.self, std::memory_order_relaxed);
  num_tasks_.store(num_tasks, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  counter_.store(counter_at(generation, 0), std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard<std::mutex> park(park_mutex_); }
    wake_.notify_all();
  }
  take_tasks(generation, 0);
  spin_until([&] { return done_.load(std::memory_order_acquire) >= num_tasks; });
  counter_.store(counter_at(generation, kClosed), std::memory_order_release);
  rethrow_failure();
}

void Pool::run_task(Job job, int64_t place, int worker) {
  try {
    job.call(job.self, place, worker);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void Pool::rethrow_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Pool::take_tasks(uint32_t generation, int worker) {
  uint64_t seen = counter_.load(std::memory_order_acquire);
  while (generation_of(seen) == generation) {
    const uint32_t task = static_cast<uint32_t>(seen);
    const auto call = call_.load(std::memory_order_relaxed);
    const void* self = self_.load(std::memory_order_relaxed);
    const int64_t num_tasks = num_tasks_.load(std::memory_order_relaxed);
    if (task == kClosed || static_cast<int64_t>(task) >= num_tasks) return;
    if (!counter_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    run_task({call, self}, place_of(task, num_tasks), worker);
    done_.fetch_add(1, std::memory_order_acq_rel);
    seen = counter_.load(std::memory_order_acquire);
  }
}

void Pool::work(int worker) {
  uint32_t finished = generation_of(counter_.load(std::memory_order_acquire)) - 1;
  auto deadline = Clock::now() + kSpin;
  while (!stopping_.load(std::memory_order_acquire)) {
    const uint64_t seen = counter_.load(std::memory_order_acquire);
    if (generation_of(seen) != finished && static_cast<uint32_t>(seen) != kClosed) {
      take_tasks(generation_of(seen), worker);
      finished = generation_of(seen);
      deadline = Clock::now() + kSpin;
    } else if (Clock::now() < deadline) {
      pause();
    } else {
      std::unique_lock<std::mutex> lock(park_mutex_);
      parked_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] {
        const uint64_t now = counter_.load(std::memory_order_seq_cst);
        return stopping_ || (generation_of(now) != finished && static_cast<uint32_t>(now) != kClosed);
      });
      parked_.fetch_sub(1, std::memory_order_seq_cst);
      lock.unlock();
      deadline = Clock::now() + kSpin;
    }
  }
}

// A bijection of 0..num_tasks-1: task times a number coprime to num_tasks, plus an offset.
int64_t Pool::place_of(int64_t task, int64_t num_tasks) const {
  const uint64_t seed = order_seed_.load(std::memory_order_relaxed);
  if (seed == 0) return task;
  uint64_t factor = seed % static_cast<uint64_t>(num_tasks) + 1;
  while (std::gcd(factor, static_cast<uint64_t>(num_tasks)) != 1) ++factor;
  const uint64_t n = static_cast<uint64_t>(num_tasks);
  return static_cast<int64_t>((static_cast<uint64_t>(task) * (factor % n) + seed % n) % n);
}

}  // namespace chairlift
