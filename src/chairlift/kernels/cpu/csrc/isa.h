// Which instruction set this process runs on.
#pragma once

#include <string>
#include <vector>

#include "isa_table.h"

namespace chairlift {

// The best set that the CPU has, or the one that the environment variable CHAIRLIFT_CPU_ISA names.
// Throws std::runtime_error, once and at every call, if that name is unknown or the CPU does not have it.
const IsaTable& isa();

// Names that CHAIRLIFT_CPU_ISA may have on this CPU, best first.
std::vector<std::string> available_isas();

// For tests and benchmarks: change the set of this process. Matrices that are packed stay good: the layout is the same.
void set_isa(const std::string& name);

}  // namespace chairlift
