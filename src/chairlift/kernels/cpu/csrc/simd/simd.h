// The vector layer of the instruction set that is compiled: a source isa_*.cpp names its header in CHAIRLIFT_SIMD.
#pragma once

#include CHAIRLIFT_SIMD

// GCC removes calls of functions that only prefetch, because they have no effect; inlined prefetches remain.
#define CHAIRLIFT_ALWAYS __attribute__((always_inline))
#define CHAIRLIFT_INLINE inline CHAIRLIFT_ALWAYS
