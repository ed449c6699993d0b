#define CHAIRLIFT_ISA avx512
#define CHAIRLIFT_ISA_NAME "avx512"
#define CHAIRLIFT_SIMD "simd/avx512.h"
#include "runtime/isa_table.inl"
