#define CHAIRLIFT_ISA amx
#define CHAIRLIFT_ISA_NAME "amx"
#define CHAIRLIFT_VNNI
#include "simd/avx512.h"
#include "isa_tiles.inl"
