#define CHAIRLIFT_ISA avx_vnni
#define CHAIRLIFT_ISA_NAME "avx-vnni"
#define CHAIRLIFT_BASE avx2::kTable
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_SIMD "simd/avx2.h"
#include "runtime/isa_vnni.inl"
