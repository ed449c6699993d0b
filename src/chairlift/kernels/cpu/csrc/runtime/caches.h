// The sizes of the caches of a core.
#pragma once

#include <cstdint>

namespace chairlift {

struct CacheSizes {
  int64_t first, second;  // bytes of the first-level data cache and of the second-level cache
};

// Those that the operating system reports; 32 KiB and 1 MiB where it reports none.
const CacheSizes& cache_sizes();

// Changes the sizes for this process, for tests; zeros restore them.
void set_cache_sizes(CacheSizes sizes);

}  // namespace chairlift
