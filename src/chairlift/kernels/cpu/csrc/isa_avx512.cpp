#define CHAIRLIFT_ISA avx512
#define CHAIRLIFT_ISA_NAME "avx512"
#include "simd/avx512.h"
#include "isa_table.inl"
