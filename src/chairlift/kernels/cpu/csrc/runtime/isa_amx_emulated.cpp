#define CHAIRLIFT_ISA amx_emulated
#define CHAIRLIFT_ISA_NAME "amx-emulated"
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_EMULATED_TILES
#define CHAIRLIFT_SIMD "simd/avx512.h"
#include "runtime/isa_tiles.inl"
