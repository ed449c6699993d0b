// Recordings of native calls, to repeat them in one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace chairlift {

class AttentionStep;
class Linear;
class StateStep;

// The calls of the layers of a model, for steps with the same number of rows in the same memory. Calls from Python
// would be microseconds apart, in which no weights are read. All memory that a call uses must outlive the tape.
class Tape {
 public:
  // The arguments that differ between steps: the steps of attention, the positions, and the recurrent states. Each shape
  // of heads and each group of layers with block tables of its own has an AttentionStep.
  struct Step {
    std::vector<AttentionStep*> attention;
    const int64_t* positions;
    const StateStep* states;
  };
  using Call = std::function<void(const Step&)>;

  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  ~Tape() {
    if (recording() == this) recording() = nullptr;
  }

  // The tape on which this thread records, or null.
  static Tape*& recording() {
    thread_local Tape* tape = nullptr;
    return tape;
  }

  // Records the calls of this thread from now on, whose attention uses these steps.
  void start(std::vector<AttentionStep*> steps) {
    steps_ = std::move(steps);
    recording() = this;
  }
  void add(Call call) { calls_.push_back(std::move(call)); }
  // Records multiply(next), where `next` is the linear layer that is recorded after this one, or null.
  template <typename Multiply>
  void add_linear(const Linear& linear, Multiply multiply) {
    if (last_) *last_ = &linear;
    last_ = std::make_shared<const Linear*>(nullptr);
    add([multiply, next = last_](const Step&) { multiply(*next); });
  }
  // Records attend(step, positions) for the step that a later call has in the place of this one.
  template <typename Attend>
  void add_attention(const AttentionStep& step, Attend attend) {
    const size_t index = static_cast<size_t>(std::find(steps_.begin(), steps_.end(), &step) - steps_.begin());
    if (index == steps_.size()) throw std::invalid_argument("step must be one of those that Tape.start received");
    add([attend, index](const Step& now) { attend(*now.attention[index], now.positions); });
  }
  // Records compute(states) for the states of the later step.
  template <typename Compute>
  void add_recurrence(Compute compute) {
    reads_states_ = true;
    add([compute](const Step& now) { compute(*now.states); });
  }
  // Records a call of several products, of which `first` is computed first. The call does not prefetch the layer after it.
  void add_products(const Linear& first, Call call) {
    if (last_) *last_ = &first;
    last_ = nullptr;
    add(std::move(call));
  }
  size_t num_steps() const { return steps_.size(); }
  bool reads_states() const { return reads_states_; }
  size_t size() const { return calls_.size(); }
  void replay(const Step& step) const {
    for (const Call& call : calls_) call(step);
  }

 private:
  std::vector<Call> calls_;
  std::shared_ptr<const Linear*> last_;  // set to the next linear layer when it is recorded
  std::vector<AttentionStep*> steps_;  // while it records
  bool reads_states_ = false;
};

}  // namespace chairlift
