// Compiled for each instruction set, see isa_*.cpp.
#include "attention_tiles.inl"
#include "isa_table.h"
#include "linear_tiles.inl"
#include "ceilings.inl"
#include "sampling_rows.inl"

namespace chairlift::CHAIRLIFT_ISA {

extern const IsaTable kTable;
const IsaTable kTable = {CHAIRLIFT_ISA_NAME, linear_tiles(), attention_tiles(), sampling_rows(),
                         ceiling_loops()};

}  // namespace chairlift::CHAIRLIFT_ISA
