#define CHAIRLIFT_ISA avx512_vnni
#define CHAIRLIFT_ISA_NAME "avx512-vnni"
#define CHAIRLIFT_BASE avx512::kTable
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_SIMD "simd/avx512.h"
#include "runtime/isa_vnni.inl"
