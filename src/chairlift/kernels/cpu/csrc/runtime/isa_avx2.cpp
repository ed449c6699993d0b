#define CHAIRLIFT_ISA avx2
#define CHAIRLIFT_ISA_NAME "avx2"
#define CHAIRLIFT_SIMD "simd/avx2.h"
#include "runtime/isa_table.inl"
