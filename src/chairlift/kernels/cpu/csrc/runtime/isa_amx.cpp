#define CHAIRLIFT_ISA amx
#define CHAIRLIFT_ISA_NAME "amx"
#define CHAIRLIFT_TILES
#define CHAIRLIFT_BASE avx512_vnni::table()
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_BF16
#define CHAIRLIFT_SIMD "simd/avx512.h"
#include "runtime/isa_tiles.inl"
