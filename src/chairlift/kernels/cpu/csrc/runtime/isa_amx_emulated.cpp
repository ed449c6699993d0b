// Tiles in plain loops between vectors of plain C++ with the lanes of AVX-512, and all other functions of AVX2. The products
// have the bits of `amx`; norms of hidden states add the lanes of AVX2.
#define CHAIRLIFT_ISA amx_emulated
#define CHAIRLIFT_ISA_NAME "amx-emulated"
#define CHAIRLIFT_TILES
#define CHAIRLIFT_BASE avx2::kTable
#define CHAIRLIFT_EMULATED_TILES
#define CHAIRLIFT_LANES 16
#define CHAIRLIFT_SIMD "simd/portable.h"
#include "runtime/isa_tiles.inl"
