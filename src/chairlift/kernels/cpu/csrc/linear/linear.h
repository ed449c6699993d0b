// Linear layers over packed weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "linear/linear_tiles.h"
#include "linear/norm.h"
#include "linear/packed_matrix.h"

namespace chairlift {

// A linear layer: prologue, product and bias, computed on the threads of the pool.
class Linear {
 public:
  // parts: matrices with the same input, whose outputs follow each other; of one format, or all of them grouped.
  // bias [out_features] or empty; norm_weight and norm_bias [in_features] and parameters where the prologue has them.
  Linear(std::vector<std::shared_ptr<const PackedMatrix>> parts, std::vector<float> bias, Prologue prologue,
         std::vector<float> norm_weight, std::vector<float> norm_bias, float eps, std::vector<float> parameters = {});
  // The same with a norm, or none, whose weights may be shared with other layers.
  Linear(std::vector<std::shared_ptr<const PackedMatrix>> parts, std::vector<float> bias, const Norm& norm);

  int64_t in_features() const { return parts_[0]->in_features(); }
  // The width of x.
  int64_t input_width() const { return in_features() * (is_gated(prologue_) ? 2 : 1); }
  int64_t out_features() const;
  PrologueArgs prologue_args() const;

  // x [rows, in_features], or [rows, 2 * in_features] if gated; out [rows, out_features], without overlap with
  // x. Strides are in floats. `next`: the layer that is computed after this one, or null. A thread that has finished
  // prefetches its first weights. `row_ids`: if not null, row i of the layer is row row_ids[i] of x.
  void operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride, bool add,
                  const Linear* next = nullptr, const int32_t* row_ids = nullptr) const;

  // Whether `feed` can compute the gated prologue of `down` with the outputs: gate and up have whole stripes.
  bool can_feed(const Linear& down) const;
  // Computes this layer and then `down`, whose prologue is gated. The outputs of gate and up remain in the caches; the bits
  // are those of a prologue of their rows. inner: [rows, in_features of down], which may be overwritten; out: [rows,
  // out_features of down].
  void feed(const Linear& down, const float* x, int64_t x_stride, int64_t rows, float* inner, int64_t inner_stride, float* out,
            int64_t out_stride, bool add, const Linear* next = nullptr, const int32_t* row_ids = nullptr) const;

  // A layer with its input and output, which are those of operator().
  struct Part {
    const Linear* layer;
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t out_stride;
  };
  // Computes layers that do not depend on each other. Each is computed by one thread, so that threads wait for each other once,
  // unless that would leave threads idle for many rows.
  static void each(const std::vector<Part>& parts, int64_t rows);

 private:
  struct Activations;
  struct Call;
  struct Product;
  struct Stripes;
  struct Tiling;
  struct PrefetchRange;
  static constexpr int kAllThreads = -1;
  Linear(std::vector<std::shared_ptr<const PackedMatrix>> parts, std::vector<float> bias, Prologue prologue, Norm norm,
         std::vector<float> parameters);
  void prepare(const Call& call, const Activations& activations, int64_t first, uint8_t* scratch) const;
  void choose_channels(const Call& call, const Activations& activations, uint8_t* scratch) const;
  void move_to_channels(const Call& call, const Activations& activations, int64_t block) const;
  void multiply(const Call& call, const Activations& activations, const Tiling& tiling, int64_t tile,
                const PrefetchRange& next, uint8_t* scratch, float* outputs) const;
  void multiply_stripes(const Product& product, const Activations& activations, int64_t first_block, int64_t last_block,
                        uint8_t* scratch) const;
  void multiply_input_ranges(const Product& product, const Activations& activations, int64_t first_block,
                             int64_t last_block, uint8_t* sums) const;
  void run(const Call& call, const Linear* next, int worker = kAllThreads) const;
  const ProductKernel& kernel_of(const PackedMatrix& part, int64_t rows) const;
  int64_t num_stripe_tiles(int64_t at_once) const;
  Stripes stripes_of(int64_t index, int64_t at_once) const;
  Stripes gate_of(int64_t index, int64_t at_once) const;
  Stripes up_of(const Stripes& gate) const;
  PrefetchRange first_weights(int64_t rows, int64_t range, int64_t num_ranges) const;

  std::vector<std::shared_ptr<const PackedMatrix>> parts_;
  std::vector<float> bias_;
  Prologue prologue_;
  Norm norm_;  // none if the prologue is no norm
  std::vector<float> parameters_;
};

}  // namespace chairlift
