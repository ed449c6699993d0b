// Memory that is kept from call to call.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <cstddef>
#include <new>

namespace chairlift {

// Grows by whole pages, and what was in it is lost then. In builds for sanitizers it moves at every call, has not a byte
// more than was asked for, and is full of NaN: so they find what is read beyond it, or too late, or never written.
class KeptMemory {
 public:
  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() { free(data_); }

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
