// The inputs of int8 products with tiles that are outliers in many rows: one dense tile of a row holds the multiples of
// 128 of all of them. Sums of integers are exact, so the choice changes no bit of a result.
#pragma once

#include <cstdint>

#include "linear/linear_tiles.h"

namespace chairlift {

// The chosen inputs of a step.
struct OutlierChannels {
  static constexpr int kMost = 64;       // the inputs of a tile
  static constexpr uint8_t kNone = 255;  // the place of inputs that were not chosen

  int32_t count;
  int32_t inputs[kMost];
};

// Chooses the inputs that are outliers most often in a sample of the rows, or none if that saves no time.
//
// lists: the outliers of each row, see OutlierList, outlier_list_ints(padded_inputs) apart. places [padded_inputs]: the
// index of each input among the chosen ones, overwritten. counts [padded_inputs]: scratch memory.
void choose_outlier_channels(const int32_t* lists, int64_t rows, int64_t padded_inputs, int32_t* counts,
                             OutlierChannels& chosen, uint8_t* places);

// Moves the outliers of a row at the chosen inputs from its list to dense [OutlierChannels::kMost].
void move_to_dense(const uint8_t* places, int64_t padded_inputs, int32_t* list, int8_t* dense);

}  // namespace chairlift
