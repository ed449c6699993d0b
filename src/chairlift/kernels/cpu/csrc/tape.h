// Calls that were made in one order, to be made again in one go.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace chairlift {

class AttentionStep;
class Linear;

// What the layers of a model call, of steps with as many rows in the same memory. Between two calls from Python pass
// microseconds, in which no weights are read. What a call points to must outlive the tape.
class Tape {
 public:
  // What differs from step to step.
  struct Step {
    AttentionStep* attention;
    const int64_t* positions;
  };
  using Call = std::function<void(const Step&)>;

  Tape() = default;
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  ~Tape() {
    if (recording() == this) recording() = nullptr;
  }

  // The tape that this thread records on, or null.
  static Tape*& recording() {
    thread_local Tape* tape = nullptr;
    return tape;
  }

  void add(Call call) { calls_.push_back(std::move(call)); }
  // multiply(next), `next` being the linear layer that is added after this one, or null.
  template <typename Multiply>
  void add_linear(const Linear& linear, Multiply multiply) {
    if (last_) *last_ = &linear;
    last_ = std::make_shared<const Linear*>(nullptr);
    add([multiply, next = last_](const Step&) { multiply(*next); });
  }
  void add_attention(Call call) {
    needs_step_ = true;
    add(std::move(call));
  }
  bool needs_step() const { return needs_step_; }
  size_t size() const { return calls_.size(); }
  void replay(const Step& step) const {
    for (const Call& call : calls_) call(step);
  }

 private:
  std::vector<Call> calls_;
  std::shared_ptr<const Linear*> last_;  // where the last linear layer looks for the next
  bool needs_step_ = false;
};

}  // namespace chairlift
