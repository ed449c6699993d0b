// Weights in the layout that products read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "linear/linear_tiles.h"

namespace chairlift {

WeightFormat parse_weight_format(const std::string& name);  // throws std::invalid_argument
const char* name_of(WeightFormat format);

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return divide_up(n, multiple) * multiple; }

// A matrix [out_features, in_features], divided into stripes (see linear_tiles.h).
class PackedMatrix {
 public:
  PackedMatrix(WeightFormat format, int64_t out_features, int64_t in_features);
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  WeightFormat format() const { return format_; }
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }
  int64_t padded_inputs() const { return padded_inputs_; }
  int64_t num_stripes() const {
    const int64_t stripes = divide_up(out_features_, kStripe);
    return is_grouped(format_) ? round_up(stripes, kStripeMultiple) : stripes;
  }
  int64_t stripe_bytes() const { return stripe_bytes_; }
  int64_t num_bytes() const { return data_bytes() + static_cast<int64_t>(input_order_.size()) * 4; }
  // For each stored column the input that it multiplies; empty if they are in order.
  const std::vector<int32_t>& input_order() const { return input_order_; }
  const uint8_t* stripe(int64_t index) const { return data_ + index * stripe_bytes_; }

  // The bytes of one row for pack_blocks.
  int64_t source_row_bytes() const;

  // Writes rows first_row .. first_row + num_rows - 1 from blocks or plain values; of int8 from signed bytes and the
  // scale, and of f8_e4m3 from bytes and the scale of each kFloatGroup inputs, in float32.
  void pack_blocks(int64_t first_row, int64_t num_rows, const uint8_t* source, int64_t row_stride);
  // Writes the same rows from floats, rounded to the format (if can_round, or the format has no groups).
  void pack_floats(int64_t first_row, int64_t num_rows, const float* source, int64_t row_stride);
  // From the bits of bfloat16.
  void pack_floats(int64_t first_row, int64_t num_rows, const uint16_t* source, int64_t row_stride);
  // Sets the order of the columns, a permutation of 0 .. in_features - 1. Products gather their inputs in this order;
  // unpack and gather return rows in the order of the inputs.
  void set_input_order(std::vector<int32_t> order);
  // Writes the values that products use to out [num_rows, in_features].
  void unpack(int64_t first_row, int64_t num_rows, float* out) const;
  // Copies rows by id to out [n, in_features].
  void gather(const int64_t* ids, int64_t n, float* out) const;

 private:
  int64_t data_bytes() const { return num_stripes() * stripe_bytes_; }
  uint8_t* stripe_of(int64_t row) { return data_ + row / kStripe * stripe_bytes_; }
  void pack_row_blocks(int64_t row, const uint8_t* source);
  void pack_row_floats(int64_t row, const float* source);
  // Calls pack(row, index of the row among these) for each row. The rows of a stripe share cache lines, so one thread
  // writes all of them.
  template <typename Pack>
  void pack_rows(int64_t first_row, int64_t num_rows, const Pack& pack);
  void unpack_row(int64_t row, float* out) const;
  void unpack_stored_row(int64_t row, float* out) const;

  WeightFormat format_;
  int64_t out_features_, in_features_, padded_inputs_, stripe_bytes_;
  std::unique_ptr<void, void (*)(void*)> memory_;
  uint8_t* data_;  // in memory_, aligned
  std::vector<int32_t> input_order_;
};

}  // namespace chairlift
