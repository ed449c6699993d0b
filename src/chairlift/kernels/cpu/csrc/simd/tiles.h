// Tile registers (AMX): products of 16 x 16 outputs at a time, in hardware or emulated.
//
// There are eight tiles of 16 rows of 64 bytes. A product is C += A B, where C has 16 x 16 values of 32 bits. A has 16
// rows of 64 bytes, and B has the same number of inputs for 16 columns: 16 rows of 16 columns of four bytes, which is the
// layout of a stripe of weights. The functions of both classes give the same bits.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd/simd.h"
#include "simd/tile_products.h"

namespace chairlift::CHAIRLIFT_ISA {

// Tiles 4 and 5 are left operands and 6 and 7 right ones where operands are smaller than a tile.
constexpr int kFirstRightTile = 6;
constexpr bool is_left(int tile) { return tile == 4 || tile == 5; }

#ifdef CHAIRLIFT_EMULATED_TILES

// x, with denormals as zero.
static inline F flush(F x) {
  return parts<F>([&](int i) {
    const BitsPart bits = bits_of(x.v[i]), magnitude = bits & 0x7fffffff;
    return floats_of(magnitude < 0x00800000 ? bits & 0x80000000 : bits);
  });
}

// c += a b, for signed bytes in `a`, and signed or unsigned ones in `b`.
static void add_bytes(uint8_t* c, const uint8_t* a, const uint8_t* b, int row_bytes, bool is_signed) {
  for (int m = 0; m < kTileRows; ++m, c += kTileRowBytes, a += kTileRowBytes) {
    I sums = iload(c), excess = izero();
    for (int k = 0; k < row_bytes; k += 4) {
      const I left = broadcast4(a + k), right = iload(b + k / 4 * kTileRowBytes);
      sums = dot_u8s8(sums, is_signed ? isub_bytes(right, ibytes(128)) : right, left);
      if (is_signed) excess = dot_u8s8(excess, ibytes(128), left);
    }
    istore(c, parts<I>([&](int i) { return ints_of(bits_of(sums.v[i]) - bits_of(excess.v[i])); }));
  }
}

// c += a b, for bfloat16.
static void add_bf16(uint8_t* c, const uint8_t* a, const uint8_t* b) {
  F right[kTileRows][2];
  for (int k = 0; k < kTileRows; ++k) {
    const I pairs = iload(b + k * kTileRowBytes);
    right[k][0] = flush(even_bf16(pairs));
    right[k][1] = flush(odd_bf16(pairs));
  }
  for (int m = 0; m < kTileRows; ++m, c += kTileRowBytes, a += kTileRowBytes) {
    F even = zero(), odd = zero();
    for (int k = 0; k < kTileRows; ++k) {
      const I pair = broadcast4(a + 4 * k);
      even = flush(fma(flush(even_bf16(pair)), right[k][0], even));
      odd = flush(fma(flush(odd_bf16(pair)), right[k][1], odd));
    }
    auto* const sums = reinterpret_cast<float*>(c);
    store(sums, flush(add(flush(load(sums)), flush(add(even, odd)))));
  }
}

// Vectors of plain C++ (simd/portable.h), for tests on CPUs without AMX. A use of tiles that are not configured ends the process.
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
  static void dot_s8u8() { add_bytes(of(kC), of(kA), of(kB), row_bytes(kA), false); }
  template <int kC, int kA, int kB>
  static void dot_s8s8() { add_bytes(of(kC), of(kA), of(kB), row_bytes(kA), true); }

  // Sums of products of bfloat16, in float: those of even and of odd inputs are two chains of fma that start at zero, and
  // their sum is added to C. Denormal operands and results are zero (Intel 64 and IA-32 Architectures Software
  // Developer's Manual, volume 2, TDPBF16PS).
  template <int kC, int kA, int kB>
  static void dot_bf16() { add_bf16(of(kC), of(kA), of(kB)); }

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
