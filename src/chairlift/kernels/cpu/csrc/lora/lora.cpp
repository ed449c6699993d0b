#include "lora/lora.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/isa.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

constexpr int64_t kRowsPerTask = 2 * kLoraRows;

}  // namespace

void LoraBatch::set_slots(const int64_t* slots, int64_t num_rows) {
  num_rows_ = num_rows;
  tasks_.clear();
  row_ids_.clear();
  for (int64_t row = 0; row < num_rows; ++row)
    if (slots[row] >= 0) row_ids_.push_back(row);
  std::stable_sort(row_ids_.begin(), row_ids_.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
  for (size_t i = 0; i < row_ids_.size(); ++i) {
    const auto slot = static_cast<int32_t>(slots[row_ids_[i]]);
    if (tasks_.empty() || tasks_.back().slot != slot || tasks_.back().count == kRowsPerTask)
      tasks_.push_back({slot, static_cast<int64_t>(i), 0});
    ++tasks_.back().count;
  }
}

LoraLinear::LoraLinear(std::shared_ptr<const LoraBatch> batch, std::shared_ptr<const Linear> base, int64_t max_rank,
                       std::vector<Part> parts)
    : batch_(std::move(batch)), base_(std::move(base)), max_rank_(max_rank), parts_(std::move(parts)) {
  int64_t outputs = 0;
  for (const Part& part : parts_) outputs += part.outputs;
  if (outputs != base_->out_features()) throw std::invalid_argument("the parts must have the outputs of the layer");
}

void LoraLinear::operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride) const {
  const auto& tasks = batch_->tasks();
  if (tasks.empty()) return;
  if (batch_->num_rows() != rows) throw std::invalid_argument("the batch of adapters has another number of rows");
  const int64_t inputs = base_->in_features();
  const PrologueArgs prologue = base_->prologue_args();
  const IsaTable& table = isa();
  Pool& pool = Pool::get();
  pool.run(static_cast<int64_t>(tasks.size()), [&](int64_t index, int worker) {
    const LoraBatch::Task& task = tasks[static_cast<size_t>(index)];
    const size_t num_floats = static_cast<size_t>(kLoraRows * (inputs + max_rank_));
    auto* const y = static_cast<float*>(pool.scratch(worker, num_floats * sizeof(float)));
    float* const h = y + kLoraRows * inputs;
    for (int64_t done = 0; done < task.count; done += kLoraRows) {
      const int count = static_cast<int>(std::min<int64_t>(kLoraRows, task.count - done));
      const int64_t* const ids = batch_->row_ids().data() + task.first + done;
      float* outs[kLoraRows];
      for (int r = 0; r < count; ++r) {
        const float* const row = x + ids[r] * x_stride;
        table.linear.prologue(prologue, row, row, inputs, y + r * inputs);
        outs[r] = out + ids[r] * out_stride;
      }
      for (const Part& part : parts_) {
        if (const int rank = part.ranks[task.slot]) {
          table.lora.shrink(y, count, part.a + task.slot * max_rank_ * inputs, inputs, rank, h);
          table.lora.expand(h, count, part.b + task.slot * max_rank_ * part.outputs, part.outputs, rank, outs);
        }
        for (int r = 0; r < count; ++r) outs[r] += part.outputs;
      }
    }
  });
}

}  // namespace chairlift
