// Tile registers (AMX): products of 16 x 16 outputs at a time, in hardware or emulated.
//
// There are eight tiles of 16 rows of 64 bytes. A product is C += A B, where C has 16 x 16 values of 32 bits. A has 16
// rows of 64 bytes, and B has the same number of inputs for 16 columns: 16 rows of 16 columns of four bytes, which is the
// layout of a stripe of weights. The functions of both classes give the same bits.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd/tile_products.h"

namespace chairlift::CHAIRLIFT_ISA {

// Tiles 4 and 5 are left operands and 6 and 7 right ones where operands are smaller than a tile.
constexpr int kFirstRightTile = 6;
constexpr bool is_left(int tile) { return tile == 4 || tile == 5; }

#ifdef CHAIRLIFT_EMULATED_TILES

// Plain loops, for tests on CPUs without AMX. A use of tiles that are not configured ends the process.
struct Tiles {
  static void configure(int operand_bytes = kTileRowBytes) { state().operand_bytes = operand_bytes; }
  static void release() { configure(0); }
  template <int kTile>
  static void zero() { std::memset(of(kTile), 0, kTileBytes); }
  template <int kTile>
  static void load(const void* p, int64_t stride = kTileRowBytes) {
    for (int m = 0; m < num_rows(kTile); ++m)
      std::memcpy(of(kTile) + m * kTileRowBytes, static_cast<const uint8_t*>(p) + m * stride,
                  static_cast<size_t>(row_bytes(kTile)));
  }
  template <int kTile>
  static void store(void* p, int64_t stride = kTileRowBytes) {
    for (int m = 0; m < kTileRows; ++m)
      std::memcpy(static_cast<uint8_t*>(p) + m * stride, of(kTile) + m * kTileRowBytes, kTileRowBytes);
  }

  // Sums of four products of signed (A) and unsigned or signed (B) bytes, in int32.
  template <int kC, int kA, int kB>
  static void dot_s8u8() { dot_s8<uint8_t, kC, kA, kB>(); }
  template <int kC, int kA, int kB>
  static void dot_s8s8() { dot_s8<int8_t, kC, kA, kB>(); }

  // Sums of products of bfloat16, in float: those of even and of odd inputs are two chains of fma that start at zero, and
  // their sum is added to C. Denormal operands and results are zero (Intel 64 and IA-32 Architectures Software
  // Developer's Manual, volume 2, TDPBF16PS).
  template <int kC, int kA, int kB>
  static void dot_bf16() {
    float b[2][kTileRows][16];
    for (int k = 0; k < kTileRows; ++k)
      for (int n = 0; n < 16; ++n)
        for (int odd = 0; odd < 2; ++odd) b[odd][k][n] = bf16(kB, k, 2 * n + odd);
    for (int m = 0; m < kTileRows; ++m) {
      float sums[16], pairs[2][16] = {};
      std::memcpy(sums, of(kC) + m * kTileRowBytes, kTileRowBytes);
      for (int k = 0; k < kTileRows; ++k) {
        const float even = bf16(kA, m, 2 * k), odd = bf16(kA, m, 2 * k + 1);
        for (int n = 0; n < 16; ++n) pairs[0][n] = flush(__builtin_fmaf(even, b[0][k][n], pairs[0][n]));
        for (int n = 0; n < 16; ++n) pairs[1][n] = flush(__builtin_fmaf(odd, b[1][k][n], pairs[1][n]));
      }
      for (int n = 0; n < 16; ++n) sums[n] = flush(flush(sums[n]) + flush(pairs[0][n] + pairs[1][n]));
      std::memcpy(of(kC) + m * kTileRowBytes, sums, kTileRowBytes);
    }
  }

 private:
  struct State {
    alignas(64) uint8_t registers[8][kTileBytes];
    int operand_bytes = 0;
  };
  static State& state() {
    thread_local State state;
    return state;
  }
  static uint8_t* of(int tile) {
    if (state().operand_bytes == 0) std::abort();
    return state().registers[tile];
  }
  static int num_rows(int tile) { return tile < kFirstRightTile ? kTileRows : state().operand_bytes / 4; }
  static int row_bytes(int tile) { return is_left(tile) ? state().operand_bytes : kTileRowBytes; }
  template <typename Right, int kC, int kA, int kB>
  static void dot_s8() {
    const auto* a = reinterpret_cast<const int8_t*>(of(kA));
    const auto* b = reinterpret_cast<const Right*>(of(kB));
    for (int m = 0; m < kTileRows; ++m) {
      int32_t sums[16];
      std::memcpy(sums, of(kC) + m * kTileRowBytes, kTileRowBytes);
      for (int k = 0; k < row_bytes(kA); ++k)
        for (int n = 0; n < 16; ++n) sums[n] += a[m * kTileRowBytes + k] * b[k / 4 * kTileRowBytes + n * 4 + k % 4];
      std::memcpy(of(kC) + m * kTileRowBytes, sums, kTileRowBytes);
    }
  }
  static float flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
  static float bf16(int tile, int row, int column) {
    uint16_t half;
    std::memcpy(&half, of(tile) + row * kTileRowBytes + column * 2, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return flush(x);
  }
};

#else

// Assembly instead of intrinsics, because those of GCC 12 do not tell the compiler that they access memory: it may move
// or drop the stores before them.
struct Tiles {
  // Sums are full tiles. operand_bytes: the bytes of a row of a left operand, a multiple of 4. Other threads need their own
  // configuration.
  static void configure(int operand_bytes = kTileRowBytes) {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = static_cast<uint16_t>(is_left(tile) ? operand_bytes : kTileRowBytes);
      config.rows[tile] = static_cast<uint8_t>(tile < kFirstRightTile ? kTileRows : operand_bytes / 4);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  static void release() { __asm__ volatile("tilerelease" ::: "memory"); }
  template <int kTile>
  static void zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile)); }
  template <int kTile>
  static void load(const void* p, int64_t stride = kTileRowBytes) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(p), "r"(stride) : "memory");
  }
  template <int kTile>
  static void store(void* p, int64_t stride = kTileRowBytes) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(p), "r"(stride) : "memory");
  }
  template <int kC, int kA, int kB>
  static void dot_s8u8() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  static void dot_s8s8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  static void dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

#endif

}  // namespace chairlift::CHAIRLIFT_ISA
