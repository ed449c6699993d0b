#define CHAIRLIFT_ISA portable
#define CHAIRLIFT_ISA_NAME "portable"
#include "simd/portable.h"
#include "isa_table.inl"
