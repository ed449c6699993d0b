// The recurrent states that the sequences of a step read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace chairlift {

// One sequence: its rows are begin to end - 1 of the step.
struct StateSpan {
  int64_t begin, end;
  int32_t source;  // the slot of the state before its first token; -1 for zeros
  int32_t slot;    // the slot of the state after its last token; -1 for none
  int64_t first_snapshot, last_snapshot;  // the snapshots from the first on, without the last

  int64_t num_tokens() const { return end - begin; }
};

// All layers share it, and a tape receives another one at each replay.
class StateStep {
 public:
  // The state after `count` tokens of the sequence is written to the slot as well.
  struct Snapshot {
    int32_t sequence, count, slot;
  };

  // query_start_loc [sequences + 1], sources and slots [sequences]; snapshots in the order of sequences and counts.
  // Throws std::invalid_argument if they do not fit together, or if a slot that a sequence writes is read or written by
  // another one.
  StateStep(const std::vector<int32_t>& query_start_loc, const std::vector<int32_t>& sources,
            const std::vector<int32_t>& slots, std::vector<Snapshot> snapshots);

  const std::vector<StateSpan>& spans() const { return spans_; }
  int64_t num_sequences() const { return static_cast<int64_t>(spans_.size()); }
  int64_t num_tokens() const { return spans_.back().end; }
  int64_t num_slots() const { return num_slots_; }  // one more than the largest slot

  // Calls body(count, slot) for each slot that receives a state of the sequence, by ascending count.
  template <typename Body>
  void each_write(const StateSpan& span, const Body& body) const {
    for (int64_t i = span.first_snapshot; i < span.last_snapshot; ++i)
      body(static_cast<int64_t>(snapshots_[static_cast<size_t>(i)].count), snapshots_[static_cast<size_t>(i)].slot);
    if (span.slot >= 0) body(span.num_tokens(), span.slot);
  }

 private:
  void check_slots() const;

  std::vector<StateSpan> spans_;
  std::vector<Snapshot> snapshots_;
  int64_t num_slots_ = 0;
};

}  // namespace chairlift
