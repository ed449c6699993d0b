#include "linear/ggml_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/halves.h"

namespace chairlift {
namespace {

uint16_t read_bits(const uint8_t* half) {
  uint16_t bits;
  std::memcpy(&bits, half, 2);
  return bits;
}

// Writes number(input) of kCount inputs. A local array cannot overlap the source, so the compiler uses vectors.
template <int kCount, typename Number>
void write_numbers(uint8_t* numbers, Number number) {
  uint8_t found[kCount];
  for (int i = 0; i < kCount; ++i) found[i] = static_cast<uint8_t>(number(i));
  std::memcpy(numbers, found, kCount);
}

// 16 bytes of 32 numbers: the low nibbles, then the high ones.
void read_nibbles(const uint8_t* from, uint8_t* numbers) {
  write_numbers<16>(numbers, [&](int i) { return from[i] & 15; });
  write_numbers<16>(numbers + 16, [&](int i) { return from[i] >> 4; });
}

// --- blocks of 32 -----------------------------------------------------------------------------------------------------

// scale | minimum | fifth bits | numbers
void read_block_of_32(const GroupFormat& f, const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  if (f.scales == ScaleKind::power) {
    row.factors.push_back(block[0]);
    return read_nibbles(block + 1, numbers);
  }
  row.scales.push_back(read_bits(block));
  if (f.has_minimum) row.minimums.push_back(read_bits(block + 2));
  block += f.has_minimum ? 4 : 2;
  if (f.low_bits == 8) return write_numbers<kGroup>(numbers, [&](int i) { return block[i] ^ 0x80; });
  if (!f.high_bits) return read_nibbles(block, numbers);
  uint32_t fifth;
  std::memcpy(&fifth, block, 4);
  read_nibbles(block + 4, numbers);
  for (int i = 0; i < kGroup; ++i) numbers[i] |= (fifth >> i & 1) << 4;
}

// --- blocks with a zero point -----------------------------------------------------------------------------------------

// scale | zero point | for each 32 inputs the numbers
void read_zero_point_block(const GroupFormat& f, const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  row.scales.push_back(read_bits(block));
  row.zero_points.push_back(block[2]);
  block += 3;
  if (f.low_bits == 8) {
    std::memcpy(numbers, block, static_cast<size_t>(f.scale_inputs));
    return;
  }
  for (int i = 0; i < f.scale_inputs; i += kGroup) read_nibbles(block + i / 2, numbers + i);
}

// --- blocks of 256 ----------------------------------------------------------------------------------------------------

// Writes number(run, input of the run) of the eight runs of 32 inputs.
template <typename Number>
void write_runs(uint8_t* numbers, Number number) {
  for (int run = 0; run < kSuperBlock / 32; ++run)
    write_numbers<32>(numbers + run * 32, [&](int i) { return number(run, i); });
}

// The 12 bytes with 8 scales and 8 minimums of 6 bits.
void read_six_bits(const uint8_t* s, BlockRow& row) {
  for (int j = 0; j < 8; ++j) {
    row.factors.push_back(j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4);
    row.minimum_factors.push_back(j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4);
  }
}

// scales and minimums of 4 bits [16] | numbers of 2 bits [64] | d | dmin
void read_q2_k(const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  row.scales.push_back(read_bits(block + 80));
  row.minimums.push_back(read_bits(block + 82));
  for (int j = 0; j < 16; ++j) {
    row.factors.push_back(block[j] & 15);
    row.minimum_factors.push_back(block[j] >> 4);
  }
  write_runs(numbers, [&](int run, int i) { return block[16 + run / 4 * 32 + i] >> run % 4 * 2 & 3; });
}

// third bits [32] | two bits [64] | scales of 6 bits [12] | d
void read_q3_k(const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  const uint8_t* const s = block + 96;
  row.scales.push_back(read_bits(block + 108));
  for (int j = 0; j < 16; ++j)
    row.factors.push_back(((j < 8 ? s[j] & 15 : s[j - 8] >> 4) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32);
  write_runs(numbers, [&](int run, int i) {
    return (block[32 + run / 4 * 32 + i] >> run % 4 * 2 & 3) | (block[i] >> run & 1) << 2;
  });
}

// d | dmin | scales and minimums of 6 bits [12] | q5_k: fifth bits [32] | nibbles [128]
void read_q4_k_or_q5_k(const uint8_t* block, bool has_fifth, uint8_t* numbers, BlockRow& row) {
  row.scales.push_back(read_bits(block));
  row.minimums.push_back(read_bits(block + 2));
  read_six_bits(block + 4, row);
  const uint8_t* const nibbles = block + (has_fifth ? 48 : 16);
  const auto low = [&](int run, int i) { return nibbles[run / 2 * 32 + i] >> run % 2 * 4 & 15; };
  if (!has_fifth) return write_runs(numbers, low);
  write_runs(numbers, [&](int run, int i) { return low(run, i) | (block[16 + i] >> run & 1) << 4; });
}

// nibbles [128] | two bits [64] | scales of 8 bits [16] | d
void read_q6_k(const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  row.scales.push_back(read_bits(block + 208));
  for (int j = 0; j < 16; ++j) row.factors.push_back(static_cast<int8_t>(block[192 + j]));
  write_runs(numbers, [&](int run, int i) {
    const int half = run / 4, part = run % 4;
    return (block[half * 64 + part % 2 * 32 + i] >> part / 2 * 4 & 15) | (block[128 + half * 32 + i] >> part * 2 & 3) << 4;
  });
}

// d | high bits of scales (16 bits) | low bits of scales [4] | nibbles [8][16]
void read_iq4_xs(const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  row.scales.push_back(read_bits(block));
  const int high = block[2] | block[3] << 8;
  for (int j = 0; j < 8; ++j) {
    row.factors.push_back(((block[4 + j / 2] >> j % 2 * 4 & 15) | (high >> 2 * j & 3) << 4) - 32);
    read_nibbles(block + 8 + 16 * j, numbers + kGroup * j);
  }
}

void read_block_of_256(WeightFormat format, const uint8_t* block, uint8_t* numbers, BlockRow& row) {
  switch (format) {
    case WeightFormat::q2_k: return read_q2_k(block, numbers, row);
    case WeightFormat::q3_k: return read_q3_k(block, numbers, row);
    case WeightFormat::q6_k: return read_q6_k(block, numbers, row);
    case WeightFormat::iq4_xs: return read_iq4_xs(block, numbers, row);
    default: return read_q4_k_or_q5_k(block, format == WeightFormat::q5_k, numbers, row);
  }
}

// --- rounding ---------------------------------------------------------------------------------------------------------

void round_q4_0(const float* x, uint8_t* block) {
  float extreme = 0;
  for (int i = 0; i < kGroup; ++i)
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  const float scale = extreme / -8, inverse = scale != 0 ? 1 / scale : 0;
  write_half(block, scale);
  for (int i = 0; i < 16; ++i) {
    const int low = std::min(15, static_cast<int>(x[i] * inverse + 8.5f));
    const int high = std::min(15, static_cast<int>(x[i + 16] * inverse + 8.5f));
    block[2 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

void round_q4_1(const float* x, uint8_t* block) {
  const auto [low_end, high_end] = std::minmax_element(x, x + kGroup);
  const float scale = (*high_end - *low_end) / 15, inverse = scale != 0 ? 1 / scale : 0, minimum = *low_end;
  write_half(block, scale);
  write_half(block + 2, minimum);
  for (int i = 0; i < 16; ++i) {
    const int low = std::min(15, static_cast<int>((x[i] - minimum) * inverse + 0.5f));
    const int high = std::min(15, static_cast<int>((x[i + 16] - minimum) * inverse + 0.5f));
    block[4 + i] = static_cast<uint8_t>(low | high << 4);
  }
}

void round_q8_0(const float* x, uint8_t* block) {
  float top = 0;
  for (int i = 0; i < kGroup; ++i) top = std::max(top, std::fabs(x[i]));
  const float scale = top / 127, inverse = scale != 0 ? 1 / scale : 0;
  write_half(block, scale);
  for (int i = 0; i < kGroup; ++i) block[2 + i] = rounded_byte(x[i] * inverse);
}

}  // namespace

int64_t block_inputs(WeightFormat format) {
  const GroupFormat f = group_format(format);
  return f.scales == ScaleKind::factor ? kSuperBlock : f.scale_inputs;
}

int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::q2_k: return 84;
    case WeightFormat::q3_k: return 110;
    case WeightFormat::q4_1: return 20;
    case WeightFormat::q4_k: return 144;
    case WeightFormat::q5_0: return 22;
    case WeightFormat::q5_1: return 24;
    case WeightFormat::q5_k: return 176;
    case WeightFormat::q6_k: return 210;
    case WeightFormat::q8_0: return 34;
    case WeightFormat::iq4_xs: return 136;
    case WeightFormat::mxfp4: return 17;
    case WeightFormat::u4_g32: return 19;
    case WeightFormat::u4_g128: return 67;
    case WeightFormat::u8_g32: return 35;
    default: return 18;  // q4_0, iq4_nl
  }
}

BlockRow read_blocks(WeightFormat format, const uint8_t* source, int64_t inputs) {
  BlockRow row;
  row.numbers.resize(static_cast<size_t>(inputs));
  const int64_t size = block_inputs(format), bytes = block_bytes(format);
  const GroupFormat f = group_format(format);
  for (int64_t i = 0; i < inputs / size; ++i) {
    uint8_t* const numbers = row.numbers.data() + i * size;
    if (f.scales == ScaleKind::zero_point) read_zero_point_block(f, source + i * bytes, numbers, row);
    else if (size == kGroup) read_block_of_32(f, source + i * bytes, numbers, row);
    else read_block_of_256(format, source + i * bytes, numbers, row);
  }
  return row;
}

void round_block(WeightFormat format, const float* x, uint8_t* block) {
  if (format == WeightFormat::q4_0) return round_q4_0(x, block);
  if (format == WeightFormat::q4_1) return round_q4_1(x, block);
  round_q8_0(x, block);
}

}  // namespace chairlift
