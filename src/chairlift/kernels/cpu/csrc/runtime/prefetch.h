// How products and attention prefetch what they read next.
#pragma once

namespace chairlift {

// The locality of __builtin_prefetch for the second-level cache. What is read next does not fit into the first-level cache
// beside the operands of a product, and that cache has too few outstanding misses to keep memory busy (docs/experiments.md).
constexpr int kSecondLevel = 2;

}  // namespace chairlift
