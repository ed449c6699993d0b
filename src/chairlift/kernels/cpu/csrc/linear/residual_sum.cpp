#include "linear/residual_sum.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/isa.h"
#include "runtime/pool.h"

namespace chairlift {
namespace {

// Few rows take less time than the threads need to meet.
constexpr int64_t kRowsPerTask = 8;

}  // namespace

ResidualSum::ResidualSum(Norm after, Norm of_sum, float multiplier, float scale)
    : after_(std::move(after)), of_sum_(std::move(of_sum)), multiplier_(multiplier), scale_(scale) {}

void ResidualSum::operator()(const Rows& x) const {
  if (!after_.fits(x.size) || !of_sum_.fits(x.size))
    throw std::invalid_argument("the weights of the norms must have size values");
  const ResidualArgs args = {after_.args(), of_sum_.args(), multiplier_, scale_};
  const auto add_rows = [&](int64_t task, int) {
    const int64_t end = std::min((task + 1) * kRowsPerTask, x.rows);
    for (int64_t row = task * kRowsPerTask; row < end; ++row)
      isa().linear.add_branch(args, x.branch ? x.branch + row * x.branch_stride : nullptr, x.size,
                              x.stream + row * x.stream_stride);
  };
  if (x.rows <= kRowsPerTask) return add_rows(0, 0);
  Pool::get().run((x.rows + kRowsPerTask - 1) / kRowsPerTask, add_rows);
}

}  // namespace chairlift
