#include "runtime/caches.h"

#include <unistd.h>

namespace chairlift {
namespace {

int64_t reported() {
  int64_t bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return bytes > 0 ? bytes : 1 << 20;
}

int64_t& current() {
  static int64_t bytes = reported();
  return bytes;
}

}  // namespace

int64_t second_level_cache() { return current(); }

void set_second_level_cache(int64_t bytes) { current() = bytes ? bytes : reported(); }

}  // namespace chairlift
