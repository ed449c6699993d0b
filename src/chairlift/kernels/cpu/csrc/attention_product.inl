// Products in registers: scores are queries times keys, outputs are weights times values.
#include "attention_memory.inl"

namespace chairlift::CHAIRLIFT_ISA::attention {

// c[row][column] = factor[row] * c[row][column] + the sum over k, ascending, of a[row][k] * b[k][column], one fma each;
// without factors c starts at zero. What b is, the product is told apart.
struct Product {
  const float* a;
  int64_t a_stride;
  int first_k, end_k;
  float* c;
  int64_t c_stride;
  const float* factor;
};

// b in scratch memory. Asks for bytes 64 to `bytes` of some rows of KV memory meanwhile.
struct Scratch {
  const float* b;
  int64_t stride;
  const uint8_t* const* rows;  // [kKeyTile]
  int64_t bytes;
  F at(int k, int column) const { return load(b + k * stride + column); }
  CHAIRLIFT_INLINE void meanwhile(int k, int column) const {
    if (column == 0 && k < kKeyTile) ask(rows[k], 64, bytes);
  }
};

// b is values where they are in KV memory. Asks for the next tile's keys meanwhile.
template <KVType type>
struct Values {
  const TileRows& rows;
  const TileRows& next;
  F at(int k, int column) const { return load_values<type>(rows.value[k], column, rows.value_scale[k]); }
  CHAIRLIFT_INLINE void meanwhile(int k, int column) const {
    ask(next.key[k], column * value_bytes(type), (column + kBlockVectors * kLanes) * value_bytes(type));
  }
};

// Keeps x in a register: compilers would rather load it again for each row, and loads are what there is least of.
static inline void hold(F& x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__AVX2__)
  __asm__("" : "+x"(x));
#else
  (void)x;
#endif
}

// Columns `column` to `column` + kVectors * kLanes.
template <int kRows, int kVectors, typename Source>
static void multiply(const Product& product, const Source& source, int column) {
  const Product p = product;
  const Source b_at = source;
  float* out = p.c + column;
  F c[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      c[r][v] = p.factor ? mul(load(out + r * p.c_stride + v * kLanes), set1(p.factor[r])) : zero();
  }
  for (int k = p.first_k; k < p.end_k; ++k) {
    F b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hold(b[v] = b_at.at(k, column + v * kLanes));
    b_at.meanwhile(k, column);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F a = set1(p.a[r * p.a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) c[r][v] = fma(a, b[v], c[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + r * p.c_stride + v * kLanes, c[r][v]);
  }
}

template <int kRows>
static void multiply_scratch(const Product& p, const Scratch& b, int num_vectors) {
  const int pieces = (num_vectors + kBlockVectors - 1) / kBlockVectors;
  for (int piece = 0; piece < pieces; ++piece) {
    const int first = num_vectors * piece / pieces, count = num_vectors * (piece + 1) / pieces - first;
    if (count == 1) multiply<kRows, 1>(p, b, first * kLanes);
    if (count == 2) multiply<kRows, 2>(p, b, first * kLanes);
    if (kBlockVectors > 2 && count == 3) multiply<kRows, kBlockVectors - 1>(p, b, first * kLanes);
    if (kBlockVectors > 2 && count == 4) multiply<kRows, kBlockVectors>(p, b, first * kLanes);
  }
}

}  // namespace chairlift::CHAIRLIFT_ISA::attention
