// The peak rates of this CPU: loops of only the main instruction of a kernel. The rates of kernels are compared with
// them, on the same threads and in the same process.
#pragma once

#include <cstdint>
#include <memory>

namespace chairlift {

// Compiled for each instruction set. A round is one step of every chain of a loop. The result only prevents the
// compiler from removing the loop.
struct CeilingLoops {
  int64_t dot_operations;  // additions and multiplications of one round
  int64_t fma_operations;
  int32_t (*dot_u8s8)(int64_t rounds);
  int32_t (*dot_u4s8)(int64_t rounds);
  float (*fma)(int64_t rounds);
  int32_t (*read)(const uint8_t* data, int64_t num_bytes);  // a multiple of kReadStride bytes, aligned to 64 bytes
};
constexpr int64_t kReadStride = 512;

// Each runs for about `seconds` on all threads of the pool and returns the best sample, so that a thread that starts
// late does not lower the result.
double measure_dot_u8s8(double seconds);  // operations/s: products of bytes, and their sums
double measure_dot_u4s8(double seconds);  // the same with unsigned bytes below 16
double measure_fma(double seconds);       // operations/s in float32

// A buffer that is read to measure the bandwidth of memory.
class ReadBuffer {
 public:
  // num_bytes should be several times the size of the caches. Throws std::bad_alloc.
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
