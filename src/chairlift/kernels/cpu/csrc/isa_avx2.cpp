#define CHAIRLIFT_ISA avx2
#define CHAIRLIFT_ISA_NAME "avx2"
#include "simd/avx2.h"
#include "isa_table.inl"
