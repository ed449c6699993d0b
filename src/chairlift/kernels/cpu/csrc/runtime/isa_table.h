// The functions that are compiled for each instruction set, as tables.
#pragma once

#include "attention/attention_tiles.h"
#include "runtime/ceilings.h"
#include "linear/linear_tiles.h"
#include "lora/lora_products.h"
#include "recurrence/recurrence_loops.h"
#include "sampling/sampling_rows.h"

namespace chairlift {

struct IsaTable {
  const char* name;
  LinearTiles linear;
  AttentionTiles attention;
  SamplingRows sampling;
  CeilingLoops ceilings;
  LoraProducts lora;
  RecurrenceLoops recurrence;
};

// A table of other functions than those of its base is made by the first call, because a global would be initialized with
// instructions that the CPU may not have.
#ifndef CHAIRLIFT_LEAST_ISA  // the slowest one, which is used without a look at the CPU
#define CHAIRLIFT_LEAST_ISA portable
#endif
namespace CHAIRLIFT_LEAST_ISA { extern const IsaTable kTable; }
#if defined(CHAIRLIFT_X86)
namespace avx2 { extern const IsaTable kTable; }
namespace avx_vnni { const IsaTable& table(); }
namespace avx512 { extern const IsaTable kTable; }
namespace avx512_vnni { const IsaTable& table(); }
namespace avx512_bf16 { const IsaTable& table(); }
namespace amx { const IsaTable& table(); }
namespace amx_emulated { const IsaTable& table(); }
#endif

}  // namespace chairlift
