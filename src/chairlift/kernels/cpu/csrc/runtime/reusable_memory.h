// Scratch memory that is reused from call to call.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <cstddef>
#include <new>

namespace chairlift {

// Grows by whole pages, which discards its contents. In sanitizer builds each call allocates exactly the requested size
// and fills it with NaN, so that sanitizers find reads beyond it, after the next call, or of values never written.
class ReusableMemory {
 public:
  ReusableMemory() = default;
  ReusableMemory(const ReusableMemory&) = delete;
  ReusableMemory& operator=(const ReusableMemory&) = delete;
  ~ReusableMemory() { free(data_); }

  // At least num_bytes, aligned to a page. Valid until the next call.
  void* get(size_t num_bytes) {
#if defined(CHAIRLIFT_SANITIZED)
    allocate(num_bytes);
    memset(data_, 0xff, num_bytes);
#else
    if (num_bytes > num_bytes_) allocate((num_bytes + kPage - 1) / kPage * kPage);
#endif
    return data_;
  }

 private:
  void allocate(size_t num_bytes) {
    free(data_);
    data_ = nullptr;
    num_bytes_ = 0;
    if (posix_memalign(&data_, kPage, num_bytes)) throw std::bad_alloc();
    num_bytes_ = num_bytes;
  }

  static constexpr size_t kPage = 4096;
  void* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace chairlift
