// Compiled for each instruction set, see isa_*.cpp.
#include "attention_tiles.inl"
#include "isa_table.h"
#include "linear_tiles.inl"
#include "lora_products.inl"
#include "ceilings.inl"
#include "sampling_rows.inl"

namespace chairlift::CHAIRLIFT_ISA {

// A constant of the compiler, because an initialization at load would use instructions that the CPU may not have.
extern const IsaTable kTable;
constexpr IsaTable kTable = {CHAIRLIFT_ISA_NAME, linear_tiles(), attention_tiles(), sampling_rows(),
                         ceiling_loops(), lora_products()};

}  // namespace chairlift::CHAIRLIFT_ISA
