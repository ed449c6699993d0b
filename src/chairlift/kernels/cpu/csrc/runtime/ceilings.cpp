#include "runtime/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "runtime/isa.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRounds = 20000;  // rounds of a task: about 30 microseconds
constexpr int64_t kTasks = 64;      // tasks of a sample per thread
constexpr int64_t kReadTask = 256 << 10;
constexpr int kJobs = 50;           // jobs of a sample of the barrier, so few that all threads usually run

std::atomic<int32_t> sink{0};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The highest rate of num_tasks tasks of `amount` each, over samples that take `seconds` in total.
template <typename Task>
double best_rate(int64_t num_tasks, double amount, double seconds, const Task& task) {
  const auto body = [&](int64_t i, int) { sink.fetch_add(static_cast<int32_t>(task(i)), std::memory_order_relaxed); };
  double best = 0;
  const auto start = Clock::now();
  do {
    const auto sample = Clock::now();
    Pool::get().run(num_tasks, body);
    best = std::max(best, amount * static_cast<double>(num_tasks) / seconds_since(sample));
  } while (seconds_since(start) < seconds);
  return best;
}

template <typename Loop>
double loop_rate(Loop loop, int64_t operations, double seconds) {
  const double amount = static_cast<double>(operations * kRounds);
  return best_rate(kTasks * Pool::get().num_threads(), amount, seconds, [&](int64_t) { return loop(kRounds); });
}

}  // namespace

double measure_products(const std::string& unit, double seconds) {
  for (const ProductLoop& loop : isa().ceilings.products)
    if (unit == loop.unit) return loop.run ? loop_rate(loop.run, loop.operations, seconds) : 0;
  throw std::invalid_argument("unit must be one of dot_s8s8, dot_u4s8, fma, tile_s8, tile_bf16, dot_bf16, got '" + unit + "'");
}

double measure_barrier(double seconds) {
  Pool& pool = Pool::get();
  const int64_t num_threads = pool.num_threads();
  std::atomic<int64_t> arrived{0};
  const auto meet = [&](int64_t, int) {
    arrived.fetch_add(1, std::memory_order_acq_rel);
    spin_until([&] { return arrived.load(std::memory_order_acquire) >= num_threads; });
  };
  double least = std::numeric_limits<double>::infinity();
  const auto start = Clock::now();
  do {
    const auto sample = Clock::now();
    for (int job = 0; job < kJobs; ++job) {
      arrived.store(0, std::memory_order_relaxed);
      pool.run(num_threads, meet);
    }
    least = std::min(least, seconds_since(sample) / kJobs);
  } while (seconds_since(start) < seconds);
  return least;
}

void ReadBuffer::Free::operator()(uint8_t* data) const { std::free(data); }

ReadBuffer::ReadBuffer(int64_t num_bytes)
    : num_tasks_(std::max<int64_t>(1, num_bytes / kReadTask)),
      data_(static_cast<uint8_t*>(std::aligned_alloc(4096, static_cast<size_t>(num_tasks_ * kReadTask)))) {
  if (!data_) throw std::bad_alloc();
  Pool::get().run(num_tasks_, [&](int64_t i, int) { std::memset(data_.get() + i * kReadTask, 1, kReadTask); });
}

double ReadBuffer::measure(double seconds) const {
  const auto read = isa().ceilings.read;
  return best_rate(num_tasks_, kReadTask, seconds,
                   [&](int64_t i) { return read(data_.get() + i * kReadTask, kReadTask); });
}

}  // namespace chairlift
