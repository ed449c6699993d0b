#include "linear/residual_sum.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/isa.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

// Few rows take less time than the threads need to meet.
constexpr int64_t kRowsPerTask = 8;

template <typename Function>
void each_row(int64_t rows, Function function) {
  const auto task_rows = [&](int64_t task, int) {
    const int64_t end = std::min((task + 1) * kRowsPerTask, rows);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) function(row);
  };
  if (rows <= kRowsPerTask) return task_rows(0, 0);
  Pool::get().run((rows + kRowsPerTask - 1) / kRowsPerTask, task_rows);
}

}  // namespace

ResidualSum::ResidualSum(Norm after, Norm of_sum, float multiplier, float scale)
    : after_(std::move(after)), of_sum_(std::move(of_sum)), multiplier_(multiplier), scale_(scale) {}

void ResidualSum::operator()(const Rows& x) const {
  if (!after_.fits(x.size) || !of_sum_.fits(x.size))
    throw std::invalid_argument("the weights of the norms must have size values");
  const ResidualArgs args = {after_.args(), of_sum_.args(), multiplier_, scale_};
  each_row(x.rows, [&](int64_t row) {
    isa().linear.add_branch(args, x.branch ? x.branch + row * x.branch_stride : nullptr, x.size,
                            x.stream + row * x.stream_stride);
  });
}

void multiply_by_gates(const GatedRows& rows) {
  if (rows.num_gates < 1 || rows.size % rows.num_gates)
    throw std::invalid_argument("num_gates=" + std::to_string(rows.num_gates) +
                                " must be at least 1 and divide size=" + std::to_string(rows.size));
  const int64_t shared = rows.size / rows.num_gates;
  each_row(rows.rows, [&](int64_t row) {
    isa().linear.multiply_by_gates(rows.activation, rows.gate + row * rows.gate_stride, rows.num_gates, shared,
                                   rows.x + row * rows.x_stride);
  });
}

}  // namespace chairlift
