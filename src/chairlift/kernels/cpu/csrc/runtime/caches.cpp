#include "runtime/caches.h"

#include <unistd.h>

namespace chairlift {
namespace {

CacheSizes reported() {
  CacheSizes sizes = {0, 0};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  sizes = {sysconf(_SC_LEVEL1_DCACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE)};
#endif
  if (sizes.first <= 0) sizes.first = 32 << 10;
  if (sizes.second <= 0) sizes.second = 1 << 20;
  return sizes;
}

CacheSizes& current() {
  static CacheSizes sizes = reported();
  return sizes;
}

}  // namespace

const CacheSizes& cache_sizes() { return current(); }

void set_cache_sizes(CacheSizes sizes) { current() = sizes.first ? sizes : reported(); }

}  // namespace chairlift
