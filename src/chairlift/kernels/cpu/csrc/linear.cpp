#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "isa.h"
#include "reusable_memory.h"
#include "pool.h"

namespace chairlift {

// The arguments of a call.
struct Linear::Call {
  const float* x;
  int64_t x_stride, rows;
  float* out;
  int64_t out_stride;
  bool add;
};

// The layout of the activations of all rows, block by block. The outliers of all blocks follow the blocks. They have
// space for the largest possible number, of which little is touched.
struct Linear::Activations {
  Activations(const PackedMatrix& matrix, int64_t rows)
      : tiles(isa().linear),
        shift(shift_of(matrix.format())),
        integer(is_integer(matrix.format())),
        num_blocks((rows + tiles.block_rows - 1) / tiles.block_rows) {
    const int64_t values = matrix.padded_inputs() * tiles.block_rows;
    const bool has_row_scale = chairlift::has_row_scale(matrix.format());
    const int64_t groups = has_row_scale ? 1 : matrix.padded_inputs() / kGroup;
    values_bytes = integer ? values : values * 4;
    scales_bytes = integer ? groups * tiles.block_rows * 4 : 0;
    num_entries = has_row_scale ? matrix.padded_inputs() / 4 : matrix.padded_inputs();
    max_outliers = std::min(matrix.padded_inputs() / kMinOutlier * tiles.block_rows, num_entries);
    quantize = has_row_scale ? tiles.quantize_row : tiles.quantize_groups;
    block_bytes = round_up(values_bytes + 3 * scales_bytes, 64);
    outlier_bytes = integer ? round_up(4 * (1 + (1 + tiles.block_rows) * max_outliers), 64) : 0;
  }

  size_t num_bytes() const { return static_cast<size_t>(num_blocks * (block_bytes + outlier_bytes)); }

  Activations in(uint8_t* memory) const {
    Activations copy = *this;
    copy.data = memory;
    return copy;
  }

  ActivationBlock block(int64_t index) const {
    uint8_t* at = data + index * block_bytes;
    uint8_t* scale = at + values_bytes;
    auto* outliers = reinterpret_cast<int32_t*>(data + num_blocks * block_bytes + index * outlier_bytes);
    return {at,           reinterpret_cast<float*>(scale), reinterpret_cast<int32_t*>(scale + scales_bytes),
            scale + 2 * scales_bytes, outliers, outliers + 1, outliers + 1 + max_outliers};
  }

  const LinearTiles& tiles;
  int shift;
  bool integer;
  int64_t num_blocks, values_bytes, scales_bytes, num_entries, max_outliers, block_bytes, outlier_bytes;
  decltype(LinearTiles::quantize_row) quantize = nullptr;
  uint8_t* data = nullptr;
};

Linear::Linear(std::shared_ptr<const PackedMatrix> matrix, std::vector<float> bias, Prologue prologue,
               std::vector<float> norm_weight, std::vector<float> norm_bias, float eps)
    : matrix_(std::move(matrix)),
      bias_(std::move(bias)),
      prologue_(prologue),
      norm_weight_(std::move(norm_weight)),
      norm_bias_(std::move(norm_bias)),
      eps_(eps) {
  const auto in = static_cast<size_t>(matrix_->in_features()), out = static_cast<size_t>(matrix_->out_features());
  const bool has_norm = prologue == Prologue::rms_norm || prologue == Prologue::layer_norm;
  if (!bias_.empty() && bias_.size() != out) throw std::invalid_argument("bias must have out_features values");
  if (norm_weight_.size() != (has_norm ? in : 0)) throw std::invalid_argument("norm_weight must have in_features values");
  if (norm_bias_.size() != (prologue == Prologue::layer_norm ? in : 0))
    throw std::invalid_argument("norm_bias must have in_features values");
  if (!bias_.empty()) bias_.resize(static_cast<size_t>(matrix_->num_stripes() * kStripe), 0.0f);
}

namespace {

// The threshold of outliers, in multiples of the mean magnitude of their group or row: kMinOutlier or more. After a norm
// a few channels are always large, and their rounding affects every product of the layer. A gated activation has many
// large values, and each outlier takes time. docs/adr/0014 has the measurements.
float outlier_after(Prologue prologue, bool has_row_scale) {
  switch (prologue) {
    case Prologue::rms_norm:
    case Prologue::layer_norm: return has_row_scale ? 4 : 5;
    case Prologue::none: return 8;
    default: return 12;
  }
}

// The scratch memory of a thread that prepares a block: a row, all rows in bytes, and the outliers before they are
// gathered.
struct PrepareScratch {
  PrepareScratch(uint8_t* memory, int64_t padded_inputs, int64_t block_rows)
      : row(reinterpret_cast<float*>(memory)),
        outlier_values(row + padded_inputs),
        bytes(reinterpret_cast<int8_t*>(outlier_values + padded_inputs * block_rows)),
        outlier_rows(reinterpret_cast<uint8_t*>(bytes + padded_inputs * block_rows)) {}

  static size_t num_bytes(int64_t padded_inputs, int64_t block_rows) {
    return static_cast<size_t>(padded_inputs * (4 + 5 * block_rows + 1));
  }

  float* row;
  float* outlier_values;
  int8_t* bytes;
  uint8_t* outlier_rows;
};

void gather_outliers(const PrepareScratch& scratch, int64_t num_entries, int64_t block_rows,
                     const ActivationBlock& to) {
  auto* entries = const_cast<int32_t*>(to.outliers);
  auto* values = static_cast<float*>(const_cast<void*>(to.outlier_values));
  int32_t count = 0;
  for (int64_t word = 0; word < num_entries; word += 8) {
    uint64_t eight;
    std::memcpy(&eight, scratch.outlier_rows + word, 8);
    if (!eight) continue;
    for (int64_t k = word; k < word + 8; ++k) {
      const unsigned rows = scratch.outlier_rows[k];
      if (!rows) continue;
      entries[count] = static_cast<int32_t>(k);
      for (int64_t r = 0; r < block_rows; ++r)
        values[count * block_rows + r] = rows >> r & 1 ? scratch.outlier_values[k * block_rows + r] : 0;
      ++count;
    }
  }
  *const_cast<int32_t*>(to.num_outliers) = count;
}

}  // namespace

// Computes the prologue of one block of rows, and writes the result in the layout that tiles read.
void Linear::prepare(const Call& call, const Activations& activations, int64_t block, uint8_t* memory) const {
  const LinearTiles& tiles = activations.tiles;
  const int64_t inputs = matrix_->in_features(), padded = matrix_->padded_inputs();
  const ActivationBlock to = activations.block(block);
  const PrologueArgs args = {prologue_, norm_weight_.data(), norm_bias_.data(), eps_};
  const int64_t first = block * tiles.block_rows, last = std::min<int64_t>(first + tiles.block_rows, call.rows);
  const PrepareScratch scratch(memory, padded, tiles.block_rows);
  if (activations.integer) std::memset(scratch.outlier_rows, 0, static_cast<size_t>(activations.num_entries));
  for (int64_t r = first; r < last; ++r) {
    const float* const row = call.x + r * call.x_stride;
    tiles.prologue(args, row, r + 1 < call.rows ? row + call.x_stride : row, inputs, scratch.row);
    for (int64_t i = inputs; i < padded; ++i) scratch.row[i] = 0;
    const RowTarget target = {const_cast<void*>(to.values),
                              const_cast<float*>(to.scale),
                              const_cast<int32_t*>(to.correction),
                              const_cast<void*>(to.sum),
                              static_cast<int>(r - first),
                              outlier_after(prologue_, has_row_scale(matrix_->format())),
                              scratch.outlier_rows,
                              scratch.outlier_values};
    if (activations.integer)
      activations.quantize(scratch.row, padded, activations.shift, scratch.bytes + (r - first) * padded, target);
    else
      tiles.interleave(scratch.row, padded, target);
  }
  if (!activations.integer) return;
  tiles.interleave_steps(scratch.bytes, padded, padded, static_cast<int8_t*>(const_cast<void*>(to.values)));
  gather_outliers(scratch, activations.num_entries, tiles.block_rows, to);
}

// Packed weights to be prefetched.
struct Linear::Weights {
  const uint8_t* at = nullptr;
  int64_t num_bytes = 0;

  // The weights of a tile.
  static Weights from(const PackedMatrix& matrix, int64_t first_stripe, int64_t num_stripes) {
    const int64_t stripes = std::clamp<int64_t>(matrix.num_stripes() - first_stripe, 0, num_stripes);
    return {matrix.stripe(first_stripe), stripes * matrix.stripe_bytes()};
  }

  // The weights that a thread multiplies first, where all rows are in one tile.
  static Weights first(const PackedMatrix& matrix, int64_t range, int64_t num_ranges) {
    const int64_t at_once = isa().linear.tile_stripes, tiles = (matrix.num_stripes() + at_once - 1) / at_once;
    return from(matrix, tiles * range / num_ranges * at_once, at_once);
  }

  // Always inlined, because GCC removes calls of functions that only prefetch.
  inline __attribute__((always_inline)) void prefetch() const {
    constexpr int64_t kMost = 64 << 10;
    for (int64_t i = 0; i < std::min(num_bytes, kMost); i += 64) __builtin_prefetch(at + i);
  }
};

// The tiles of a product: as many stripes as the kernel computes at once, times as many blocks of rows as fit into the
// second-level cache. Consecutive tiles have consecutive stripes.
struct Linear::Tiling {
  static constexpr int64_t kActivationBytes = 256 << 10;

  Tiling(const PackedMatrix& matrix, const Activations& activations)
      : stripes_at_once(activations.tiles.tile_stripes),
        blocks_at_once(even_part(activations.num_blocks, kActivationBytes / activations.block_bytes)),
        stripe_tiles((matrix.num_stripes() + stripes_at_once - 1) / stripes_at_once),
        num_tiles(stripe_tiles * ((activations.num_blocks + blocks_at_once - 1) / blocks_at_once)) {}

  // The size of nearly equal parts of n, each at most `most` (but at least one).
  static int64_t even_part(int64_t n, int64_t most) {
    const int64_t parts = (n + std::max<int64_t>(most, 1) - 1) / std::max<int64_t>(most, 1);
    return (n + parts - 1) / parts;
  }

  int64_t first_stripe(int64_t tile) const { return tile % stripe_tiles * stripes_at_once; }
  int64_t first_block(int64_t tile) const { return tile / stripe_tiles * blocks_at_once; }
  Weights weights_after(const PackedMatrix& matrix, int64_t tile) const {
    return Weights::from(matrix, first_stripe(tile) + stripes_at_once, stripes_at_once);
  }

  int64_t stripes_at_once, blocks_at_once, stripe_tiles, num_tiles;
};

// Computes a tile, and prefetches the weights that its thread multiplies next, a share with each block. Reading and
// computing overlap, so that a product takes the longer of the two times and not their sum.
void Linear::multiply(const Call& call, const Activations& activations, const Tiling& tiling, int64_t tile,
                      const Weights& next) const {
  const auto multiply = activations.tiles.multiply[static_cast<int>(matrix_->format())];
  const int64_t stripes = matrix_->num_stripes(), at_once = tiling.stripes_at_once;
  const int64_t first_stripe = tiling.first_stripe(tile), last_stripe = std::min(first_stripe + at_once, stripes);
  const int64_t first_block = tiling.first_block(tile), block_rows = activations.tiles.block_rows;
  const int64_t last_block = std::min(first_block + tiling.blocks_at_once, activations.num_blocks);
  const int64_t share = round_up(divide_up(next.num_bytes, last_block - first_block), 64);
  const int64_t ahead_step = round_up(divide_up(share, matrix_->padded_inputs() / kGroup), 64);
  const int64_t step = last_stripe - first_stripe < at_once ? 1 : at_once;
  for (int64_t stripe = first_stripe; stripe < last_stripe; stripe += step) {
    const int64_t column = stripe * kStripe, columns = std::min(step * kStripe, matrix_->out_features() - column);
    const float* const bias = bias_.empty() ? nullptr : bias_.data() + column;
    for (int64_t block = first_block, ahead = 0; block < last_block; ++block, ahead += share) {
      const int64_t row = block * block_rows, left = std::max<int64_t>(next.num_bytes - ahead, 0);
      multiply({matrix_->stripe(stripe), matrix_->stripe_bytes(), static_cast<int>(step),
                next.at + std::min(ahead, next.num_bytes), std::min(share, left), ahead_step,
                matrix_->padded_inputs(), activations.block(block),
                static_cast<int>(std::min(block_rows, call.rows - row)), bias,
                call.out + row * call.out_stride + column, call.out_stride, static_cast<int>(columns), call.add});
    }
  }
}

// A single block is prepared by every thread separately, because waiting for another thread would take as long. Several
// blocks are divided among the threads, in memory of the calling thread.
void Linear::operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride, bool add,
                        const Linear* next) const {
  thread_local ReusableMemory shared;
  if (rows <= 0) return;
  const Call call = {x, x_stride, rows, out, out_stride, add};
  const Activations layout(*matrix_, rows);
  const Tiling tiling(*matrix_, layout);
  const int64_t num_blocks = layout.num_blocks;
  const bool is_shared = num_blocks > 1;
  auto* const memory = is_shared ? static_cast<uint8_t*>(shared.get(layout.num_bytes())) : nullptr;
  const size_t prepare_bytes = static_cast<size_t>(round_up(
      static_cast<int64_t>(PrepareScratch::num_bytes(matrix_->padded_inputs(), layout.tiles.block_rows)), 64));
  const size_t scratch_bytes = prepare_bytes + (is_shared ? 0 : layout.num_bytes());
  Pool& pool = Pool::get();
  Ranges tiles(pool, tiling.num_tiles);
  std::atomic<int64_t> next_block{0}, prepared{0};
  pool.run(tiles.count(), [&](int64_t range, int worker) {
    // Allocation may throw, so it precedes the wait for other threads.
    auto* const scratch = static_cast<uint8_t*>(pool.scratch(worker, scratch_bytes));
    const Activations activations = layout.in(is_shared ? memory : scratch + prepare_bytes);
    Weights::first(*matrix_, range, tiles.count()).prefetch();
    if (is_shared) {
      for (int64_t block; (block = next_block.fetch_add(1)) < num_blocks; prepared.fetch_add(1))
        prepare(call, activations, block, scratch);
      spin_until([&] { return prepared.load(std::memory_order_acquire) >= num_blocks; });
    } else {
      prepare(call, activations, 0, scratch);
    }
    tiles.take(range, [&](int64_t tile, int64_t its_range, bool is_last) {
      Weights ahead = is_last ? Weights{} : tiling.weights_after(*matrix_, tile);
      if (is_last && next) ahead = Weights::first(*next->matrix_, its_range, tiles.count());
      multiply(call, activations, tiling, tile, ahead);
    });
  });
}

}  // namespace chairlift
