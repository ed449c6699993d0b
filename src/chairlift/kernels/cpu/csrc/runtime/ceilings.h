// The peak rates of this CPU: loops of only the main instruction of a kernel. The rates of kernels are compared with
// them, on the same threads and in the same process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace chairlift {

// Compiled for each instruction set. A round is one step of every chain of a loop. The result only prevents the
// compiler from removing the loop.
struct ProductLoop {
  const char* unit;
  int64_t operations;              // additions and multiplications of one round
  int32_t (*run)(int64_t rounds);  // null where the instruction set has no such products
};
struct CeilingLoops {
  ProductLoop products[6];
  int32_t (*read)(const uint8_t* data, int64_t num_bytes);  // a multiple of kReadStride bytes, aligned to 64 bytes
};
constexpr int64_t kReadStride = 512;

// Each runs for about `seconds` on all threads of the pool and returns the best sample, so that a thread that starts
// late does not lower the result.
// unit: dot_s8s8 (products of bytes, and their sums), dot_u4s8 (the same with codes of four bits), fma (float32), tile_s8 and
// tile_bf16 (the same with tiles), dot_bf16 (AVX-512 BF16). Returns operations/s, or 0 where the instruction set has no such
// products.
// Throws std::invalid_argument for another unit.
double measure_products(const std::string& unit, double seconds);

// Seconds of a job in which all threads of the pool meet once and then finish: the least of samples that take `seconds`
// in total. Each of them runs many jobs one after the other.
double measure_barrier(double seconds);

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
