// The instruction set of this process.
#pragma once

#include <string>
#include <vector>

#include "runtime/isa_table.h"

namespace chairlift {

// The best instruction set of the CPU, or the one that the environment variable CHAIRLIFT_CPU_ISA names.
// Throws std::runtime_error at every call if the name is unknown or the CPU does not have the instruction set.
const IsaTable& isa();

// The names that CHAIRLIFT_CPU_ISA may have on this CPU, best first.
std::vector<std::string> available_isas();

// Changes the instruction set of this process, for tests and benchmarks. Packed matrices remain valid: all sets share
// their layout.
void set_isa(const std::string& name);

}  // namespace chairlift
