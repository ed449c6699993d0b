// The functions that are compiled for each instruction set, as tables.
#pragma once

#include "attention_tiles.h"
#include "ceilings.h"
#include "linear_tiles.h"
#include "lora_products.h"
#include "sampling_rows.h"

namespace chairlift {

struct IsaTable {
  const char* name;
  LinearTiles linear;
  AttentionTiles attention;
  SamplingRows sampling;
  CeilingLoops ceilings;
  LoraProducts lora;
};

}  // namespace chairlift
