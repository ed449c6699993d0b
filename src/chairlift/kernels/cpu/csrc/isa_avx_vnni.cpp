#define CHAIRLIFT_ISA avx_vnni
#define CHAIRLIFT_ISA_NAME "avx-vnni"
#define CHAIRLIFT_VNNI
#include "simd/avx2.h"
#include "isa_table.inl"
