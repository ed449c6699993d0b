// Tiles in plain loops, and all else in plain C++ with the lanes of AVX-512, hence with the bits of `amx`.
#define CHAIRLIFT_ISA amx_emulated
#define CHAIRLIFT_ISA_NAME "amx-emulated"
#define CHAIRLIFT_BASE amx_emulated
#define CHAIRLIFT_EMULATED_TILES
#define CHAIRLIFT_LANES 16
#define CHAIRLIFT_SIMD "simd/portable.h"
#include "runtime/isa_table.inl"
#include "runtime/isa_tiles.inl"
