// Compiled for each instruction set, see isa_*.cpp.
#pragma once

#include "attention/attention_tiles.inl"
#include "linear/linear_tiles.inl"
#include "lora/lora_products.inl"
#include "recurrence/recurrence_loops.inl"
#include "runtime/ceilings.inl"
#include "runtime/isa_table.h"
#include "sampling/sampling_rows.inl"
#include "simd/simd.h"

namespace chairlift::CHAIRLIFT_ISA {

// A constant of the compiler, because an initialization at load would use instructions that the CPU may not have.
extern const IsaTable kTable;
constexpr IsaTable kTable = {CHAIRLIFT_ISA_NAME, linear_tiles(), attention_tiles(), sampling_rows(),
                         ceiling_loops(), lora_products(), recurrence_loops()};

}  // namespace chairlift::CHAIRLIFT_ISA
