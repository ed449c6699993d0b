// LoRA adapters (Hu et al., 2021) of the rows of a batch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear/linear.h"

namespace chairlift {

// The adapters of the rows of one step. All layers share it, and a tape reads it again at each replay.
class LoraBatch {
 public:
  // Rows of the same adapter: row_ids()[first] to row_ids()[first + count - 1].
  struct Task {
    int32_t slot;
    int64_t first, count;
  };

  // Sets the adapter slot of each row, or -1 for none.
  void set_slots(const int64_t* slots, int64_t num_rows);

  int64_t num_rows() const { return num_rows_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  const std::vector<int64_t>& row_ids() const { return row_ids_; }

 private:
  int64_t num_rows_ = 0;
  std::vector<Task> tasks_;
  std::vector<int64_t> row_ids_;
};

// The matrices of all adapters for one linear layer: out += b^T (a prologue(x)) for the rows that have an adapter.
class LoraLinear {
 public:
  // The matrices for consecutive outputs: a [slots][max_rank][inputs], b [slots][max_rank][outputs] with the scale of
  // the adapter, ranks [slots]. They must outlive the layer.
  struct Part {
    const float* a;
    const float* b;
    const int32_t* ranks;
    int64_t outputs;
  };

  // Throws std::invalid_argument if the outputs of the parts are not those of the layer.
  LoraLinear(std::shared_ptr<const LoraBatch> batch, std::shared_ptr<const Linear> base, int64_t max_rank,
             std::vector<Part> parts);

  // x and out as for the base layer, which has been computed. Throws std::invalid_argument if the batch has another
  // number of rows.
  void operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride) const;

 private:
  std::shared_ptr<const LoraBatch> batch_;
  std::shared_ptr<const Linear> base_;
  int64_t max_rank_;
  std::vector<Part> parts_;
};

}  // namespace chairlift
