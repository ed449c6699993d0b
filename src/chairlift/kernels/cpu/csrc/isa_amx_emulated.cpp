#define CHAIRLIFT_ISA amx_emulated
#define CHAIRLIFT_ISA_NAME "amx-emulated"
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_EMULATED_TILES
#include "simd/avx512.h"
#include "isa_tiles.inl"
