#define CHAIRLIFT_ISA avx512_vnni
#define CHAIRLIFT_ISA_NAME "avx512-vnni"
#define CHAIRLIFT_VNNI
#include "simd/avx512.h"
#include "isa_table.inl"
