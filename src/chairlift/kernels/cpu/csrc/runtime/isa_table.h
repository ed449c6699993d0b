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

}  // namespace chairlift
