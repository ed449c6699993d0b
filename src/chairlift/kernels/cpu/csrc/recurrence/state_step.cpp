#include "recurrence/state_step.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace chairlift {

StateStep::StateStep(const std::vector<int32_t>& query_start_loc, const std::vector<int32_t>& sources,
                     const std::vector<int32_t>& slots, std::vector<Snapshot> snapshots)
    : snapshots_(std::move(snapshots)) {
  const size_t count = slots.size();
  if (count == 0 || sources.size() != count || query_start_loc.size() != count + 1)
    throw std::invalid_argument("query_start_loc must have one value more than sources and slots, which are not empty");
  if (query_start_loc[0] != 0 || !std::is_sorted(query_start_loc.begin(), query_start_loc.end()))
    throw std::invalid_argument("query_start_loc must ascend from 0");
  int64_t at = 0;
  const auto num_snapshots = static_cast<int64_t>(snapshots_.size());
  for (size_t i = 0; i < count; ++i) {
    StateSpan span = {query_start_loc[i], query_start_loc[i + 1], sources[i], slots[i], at, at};
    int32_t least = 1;
    for (; at < num_snapshots && snapshots_[static_cast<size_t>(at)].sequence == static_cast<int32_t>(i); ++at) {
      const Snapshot& snapshot = snapshots_[static_cast<size_t>(at)];
      if (snapshot.count < least || snapshot.count > span.num_tokens() || snapshot.slot < 0)
        throw std::invalid_argument(
            "the counts of snapshots must ascend from 1 to the tokens of the sequence, and have slots");
      least = snapshot.count;
    }
    span.last_snapshot = at;
    spans_.push_back(span);
  }
  if (at != num_snapshots) throw std::invalid_argument("snapshots must be in the order of the sequences of the step");
  check_slots();
  for (const StateSpan& span : spans_) num_slots_ = std::max<int64_t>(num_slots_, std::max(span.source, span.slot) + 1);
  for (const Snapshot& snapshot : snapshots_) num_slots_ = std::max<int64_t>(num_slots_, snapshot.slot + 1);
}

void StateStep::check_slots() const {
  std::vector<std::pair<int32_t, size_t>> writers;  // slot, sequence
  for (size_t i = 0; i < spans_.size(); ++i)
    each_write(spans_[i], [&](int64_t, int32_t slot) { writers.emplace_back(slot, i); });
  std::sort(writers.begin(), writers.end());
  const auto refuse = [](int32_t slot) {
    throw std::invalid_argument("slot " + std::to_string(slot) +
                                " is written by one sequence, and read or written by another one");
  };
  for (size_t i = 1; i < writers.size(); ++i)
    if (writers[i].first == writers[i - 1].first && writers[i].second != writers[i - 1].second)
      refuse(writers[i].first);
  for (size_t i = 0; i < spans_.size(); ++i) {
    if (spans_[i].source < -1 || spans_[i].slot < -1) throw std::invalid_argument("slots must be -1 or greater");
    const auto found = std::lower_bound(writers.begin(), writers.end(), std::make_pair(spans_[i].source, size_t{0}));
    if (found != writers.end() && found->first == spans_[i].source && found->second != i) refuse(found->first);
  }
}

}  // namespace chairlift
