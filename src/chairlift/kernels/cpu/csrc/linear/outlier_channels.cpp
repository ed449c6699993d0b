#include "linear/outlier_channels.h"

#include <algorithm>
#include <cstring>

namespace chairlift {
namespace {

constexpr int64_t kSampledRows = 64;

// A dense tile saves time if it replaces this many entries of lists for each row, and for the gathering of its weights.
// Estimated from the instructions of both, not measured.
constexpr int64_t kLeastPerRow = 2, kLeastPerProduct = 256;

}  // namespace

void choose_outlier_channels(const int32_t* lists, int64_t rows, int64_t padded_inputs, int32_t* counts,
                             OutlierChannels& chosen, uint8_t* places) {
  chosen.count = 0;
  if (rows * max_row_outliers(padded_inputs) < kLeastPerProduct) return;
  const int64_t sampled = std::min(rows, kSampledRows);
  std::fill_n(counts, padded_inputs, 0);
  for (int64_t i = 0; i < sampled; ++i) {
    const StoredOutliers row(lists + i * rows / sampled * outlier_list_ints(padded_inputs), padded_inputs);
    for (int32_t entry = 0; entry < row.count; ++entry)
      for (int j = 0; j < 4; ++j) counts[row.entries[entry] * 4 + j] += (row.values[entry] >> 8 * j & 255) != 0;
  }
  // The least count of a chosen input. As many of those with one less are chosen as have a place.
  int64_t inputs_with[kSampledRows + 1] = {}, least = kSampledRows + 1, left = OutlierChannels::kMost, found = 0;
  for (int64_t k = 0; k < padded_inputs; ++k) ++inputs_with[counts[k]];
  while (least > 1 && inputs_with[least - 1] <= left) left -= inputs_with[--least];
  std::memset(places, OutlierChannels::kNone, static_cast<size_t>(padded_inputs));
  for (int64_t k = 0; k < padded_inputs; ++k) {
    if (counts[k] == 0 || (counts[k] < least && (counts[k] < least - 1 || left-- <= 0))) continue;
    found += counts[k];
    places[k] = static_cast<uint8_t>(chosen.count);
    chosen.inputs[chosen.count++] = static_cast<int32_t>(k);
  }
  if (found * rows / sampled < kLeastPerRow * rows + kLeastPerProduct) chosen.count = 0;
}

void move_to_dense(const uint8_t* places, int64_t padded_inputs, int32_t* list, int8_t* dense) {
  std::memset(dense, 0, OutlierChannels::kMost);
  auto* const entries = list + 1;
  auto* const values = reinterpret_cast<uint32_t*>(entries + max_row_outliers(padded_inputs));
  int32_t kept = 0;
  for (int32_t i = 0; i < *list; ++i) {
    uint32_t rest = values[i];
    for (int j = 0; j < 4; ++j) {
      const uint8_t place = places[entries[i] * 4 + j];
      if (place == OutlierChannels::kNone) continue;
      dense[place] = static_cast<int8_t>(rest >> 8 * j);
      rest &= ~(255u << 8 * j);
    }
    if (rest == 0) continue;
    entries[kept] = entries[i];
    values[kept++] = rest;
  }
  *list = kept;
}

}  // namespace chairlift
