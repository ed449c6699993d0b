// The table of AVX-512 VNNI, with other products for bfloat16 weights, and for keys and values.
#define CHAIRLIFT_ISA avx512_bf16
#define CHAIRLIFT_BASE avx512_vnni::table()
#define CHAIRLIFT_VNNI
#define CHAIRLIFT_BF16
#define CHAIRLIFT_SIMD "simd/avx512.h"
#include "attention/attention_bf16.inl"
#include "attention/attention_pairs.inl"
#include "linear/linear_bf16.inl"
#include "runtime/isa_table.h"

namespace chairlift::avx512_bf16 {

const IsaTable& table() {
  static const IsaTable table = [] {
    IsaTable changed = CHAIRLIFT_BASE;
    changed.name = "avx512-bf16";
    ProductKernel& kernel = changed.linear.products[static_cast<int>(WeightFormat::bf16)];
    kernel = wide_kernel<WidePairs>(ActivationLayout::bf16_pairs);
    kernel.convert = round_bf16;
    changed.attention.prepare = attention::prepare_tiled;
    changed.attention.attend = attention::attend_tiled<attention::PairInstructions>;
    changed.ceilings.products[5] = {"dot_bf16", kChains * kLanes * 4, dot_bf16_rounds};
    return changed;
  }();
  return table;
}

}  // namespace chairlift::avx512_bf16
