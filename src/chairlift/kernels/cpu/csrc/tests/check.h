// Checks and random inputs of the C++ tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace chairlift::test {

// The subject of the current test, for the message of a failed check.
inline std::string& subject() {
  static std::string text;
  return text;
}

[[noreturn]] inline void fail(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: failed: %s\n  in: %s\n", file, line, what, subject().c_str());
  std::exit(1);
}

#define CHECK(condition) \
  do { \
    if (!(condition)) chairlift::test::fail(#condition, __FILE__, __LINE__); \
  } while (false)

// |got - expected| <= tolerance; false for NaN.
inline bool near(double got, double expected, double tolerance) { return std::fabs(got - expected) <= tolerance; }

// Reference loops over many values: sanitizers do not check them, which would take most of the time of the tests.
#define UNCHECKED __attribute__((no_sanitize("address", "thread", "undefined")))

// The sum of products, in double.
UNCHECKED inline double dot(const double* x, const double* y, int64_t n) {
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  for (; i < n; ++i) sums[0] += x[i] * y[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

// Whether only races are looked for, which needs few shapes.
#ifdef __SANITIZE_THREAD__
constexpr bool kOnlyRaces = true;
#else
constexpr bool kOnlyRaces = false;
#endif

using Sizes = std::vector<int64_t>;
// All sizes, or those that are enough for races.
inline Sizes sizes(const Sizes& all, const Sizes& of_races) { return kOnlyRaces ? of_races : all; }

// Whether functions have not been tested before: instruction sets share those that they do not replace.
template <typename Table>
bool is_new(const Table& functions) {
  static std::vector<std::string> tested;
  std::string bytes(reinterpret_cast<const char*>(&functions), sizeof(Table));
  if (std::find(tested.begin(), tested.end(), bytes) != tested.end()) return false;
  tested.push_back(std::move(bytes));
  return true;
}

// Random numbers, the same in every run. A vector of n values has no extra capacity, so that the address sanitizer
// detects accesses beyond it.
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  // The sum of four uniform numbers, with variance 1: std::normal_distribution takes two to three times as long. One of
  // 64 is doubled, so the largest are 6.9.
  float normal() {
    const uint64_t bits = next();
    const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    return (static_cast<float>(sum) - 131070) * (bits % 64 == 0 ? 2 : 1) * 2.64285e-5f;
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  template <typename T>
  const T& among(const std::vector<T>& values) {
    return values[static_cast<size_t>(below(static_cast<int64_t>(values.size())))];
  }

  std::vector<float> normals(int64_t n, float scale = 1) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = scale * normal();
    return values;
  }

  std::vector<uint8_t> bytes(int64_t n) {
    std::vector<uint8_t> values(static_cast<size_t>(n));
    for (uint8_t& value : values) value = static_cast<uint8_t>(next());
    return values;
  }

 private:
  // SplitMix64 (Steele, Lea and Flood, 2014), which takes less to compile and to run than a Mersenne twister.
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t x = (state_ ^ state_ >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }

  uint64_t state_;
};

void test_pool();
void test_linear();
void test_residual_sum();
void test_mixture();
void test_lora();
void test_recurrence();
void test_attention();
void test_sampling();

}  // namespace chairlift::test
