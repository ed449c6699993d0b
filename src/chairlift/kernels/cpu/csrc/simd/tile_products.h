// Products of tiles of bfloat16: 16 rows of 64 bytes. A tile of the left operand has 16 rows of 32 inputs; one of the right
// operand has 16 lines of pairs of inputs for 16 columns.
#pragma once

#include <cstdint>

namespace chairlift {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTileBf16Inputs = kTileRowBytes / 2;
constexpr int kMaxGroups = 4;  // groups of 16 columns of one product
constexpr int kProductColumns = kMaxGroups * kTileRows;

// c[row][column] = the sum over parts of a[row] * b[column], for groups of 16 columns. At least num_rows rows of c are
// written; a row does not depend on the others.
struct TileProduct {
  const uint8_t* a;  // tiles `a_bytes` apart
  int64_t a_bytes;
  const uint8_t* b;  // tiles [groups][parts], with groups `b_bytes` apart
  int64_t b_bytes;
  int num_parts, num_rows;
  float* c;  // [16][kProductColumns]
};

}  // namespace chairlift
