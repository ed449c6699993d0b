#include "attention/shared_keys.h"

#include <algorithm>

#include "attention/attention.h"

namespace chairlift {
namespace {

constexpr int64_t kLeastKeys = 2 * kKeyTile;  // fewer cost as much to merge as they save

class Search {
 public:
  Search(const StepShape& step, const std::vector<int64_t>& seen) : step_(step) {
    for (size_t i = 0; i < seen.size(); ++i) {
      num_blocks_.push_back(seen[i] / step.block_size);
      if (seen[i] >= kLeastKeys) order_.push_back(static_cast<int32_t>(i));
    }
    // A table that is the beginning of another one comes before it, so that it does not separate two longer ones.
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      return std::lexicographical_compare(table(a), table(a) + num_blocks(a), table(b), table(b) + num_blocks(b));
    });
    common_.resize(order_.size());
    for (size_t k = 1; k < order_.size(); ++k) common_[k] = count_common(order_[k - 1], order_[k]);
  }

  std::vector<SharedKeys> run() {
    divide(0, order_.size(), 0);
    return std::move(found_);
  }

 private:
  const int32_t* table(int32_t sequence) const { return step_.block_tables.data() + sequence * step_.max_blocks; }
  int64_t num_blocks(int32_t sequence) const { return num_blocks_[static_cast<size_t>(sequence)]; }

  int64_t count_common(int32_t a, int32_t b) const {
    const int64_t count = std::min(num_blocks(a), num_blocks(b));
    const int64_t equal = std::mismatch(table(a), table(a) + count, table(b)).first - table(a);
    return equal * step_.block_size / kKeyTile * kKeyTile;
  }

  // Calls visit(begin, end) for each longest run of sequences in the order that have the keys before `key` in common.
  template <typename Visit>
  void each_run(size_t begin, size_t end, int64_t key, const Visit& visit) const {
    for (size_t next = begin; begin < end; begin = next) {
      for (next = begin + 1; next < end && common_[next] >= key;) ++next;
      visit(begin, next);
    }
  }

  // Divides sequences that have the keys before first_key in common.
  void divide(size_t begin, size_t end, int64_t first_key) {
    const int64_t split_end = first_key + kSplit;
    each_run(begin, end, first_key + kLeastKeys, [&](size_t first, size_t last) {
      SharedKeys rest = {first_key, split_end, {}};
      each_run(first, last, split_end, [&](size_t from, size_t to) {
        if (from > first) rest.end_key = std::min(rest.end_key, common_[from]);
        if (to - from == 1) return rest.sequences.push_back(order_[from]);
        const auto begin_of = [&](size_t place) { return order_.begin() + static_cast<int64_t>(place); };
        found_.push_back({first_key, split_end, {begin_of(from), begin_of(to)}});
        divide(from, to, split_end);
      });
      if (rest.sequences.size() > 1) found_.push_back(std::move(rest));
    });
  }

  const StepShape& step_;
  std::vector<int64_t> num_blocks_;  // of each sequence, those that all its queries see
  std::vector<int32_t> order_;
  std::vector<int64_t> common_;  // keys that a sequence of the order has in common with the one before it
  std::vector<SharedKeys> found_;
};

}  // namespace

std::vector<SharedKeys> find_shared_keys(const StepShape& step, const std::vector<int64_t>& seen) {
  return Search(step, seen).run();
}

}  // namespace chairlift
