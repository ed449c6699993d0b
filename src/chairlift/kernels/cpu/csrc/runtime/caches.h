// The size of the second-level cache of a core.
#pragma once

#include <cstdint>

namespace chairlift {

// The bytes that the operating system reports; 1 MiB where it reports none.
int64_t second_level_cache();

// Changes the size for this process, for tests; 0 restores it.
void set_second_level_cache(int64_t bytes);

}  // namespace chairlift
