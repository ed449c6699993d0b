// What this CPU can do at most: loops of nothing but the instruction that a kernel is made of. Kernels are compared with
// them, on the same threads and in the same process.
#pragma once

#include <cstdint>
#include <memory>

namespace chairlift {

// Compiled for each instruction set. A round is one step of every chain of a loop; the result only keeps the compiler
// from leaving the loop out.
struct CeilingLoops {
  int64_t dot_operations;  // of one round: additions and multiplications
  int64_t fma_operations;
  int32_t (*dot_u8s8)(int64_t rounds);
  int32_t (*dot_u4s8)(int64_t rounds);
  float (*fma)(int64_t rounds);
  int32_t (*read)(const uint8_t* data, int64_t num_bytes);  // a multiple of kReadStride, aligned to 64
};
constexpr int64_t kReadStride = 512;

// Each runs for about `seconds` on all threads of the pool and gives the best of its samples, so that neither a late
// thread nor a slow moment lowers the ceiling.
double measure_dot_u8s8(double seconds);  // operations/s: products of bytes, and their sums
double measure_dot_u4s8(double seconds);  // the same where the unsigned bytes are below 16
double measure_fma(double seconds);       // operations/s in float32

// What is read to measure memory.
class ReadBuffer {
 public:
  // num_bytes should be far more than the caches hold. Throws std::bad_alloc.
  explicit ReadBuffer(int64_t num_bytes);
  double measure(double seconds) const;  // bytes/s

 private:
  struct Free {
    void operator()(uint8_t* data) const;
  };

  int64_t num_tasks_;
  std::unique_ptr<uint8_t, Free> data_;
};

}  // namespace chairlift
