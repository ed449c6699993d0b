#define CHAIRLIFT_ISA portable
#define CHAIRLIFT_ISA_NAME "portable"
#define CHAIRLIFT_SIMD "simd/portable.h"
#include "runtime/isa_table.inl"
