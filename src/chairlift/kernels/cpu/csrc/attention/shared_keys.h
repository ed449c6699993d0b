// The keys that several sequences of a step read from the same blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace chairlift {

struct StepShape;

// Consecutive keys of one split, from a multiple of kKeyTile to another, and the sequences that have them in the same blocks.
struct SharedKeys {
  int64_t first_key, end_key;
  std::vector<int32_t> sequences;
};

// Divides the beginnings that block tables have in common at splits: each sequence computes a prefix of its keys with others,
// whose sequences may become fewer from split to split, and only its last shared keys may end within a split. `seen` are the
// keys of each sequence that all its queries see; 0: the sequence computes its keys alone.
std::vector<SharedKeys> find_shared_keys(const StepShape& step, const std::vector<int64_t>& seen);

}  // namespace chairlift
