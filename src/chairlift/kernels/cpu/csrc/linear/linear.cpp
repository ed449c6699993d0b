#include "linear/linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "linear/outlier_channels.h"
#include "runtime/isa.h"
#include "runtime/reusable_memory.h"
#include "runtime/pool.h"
#include "runtime/prefetch.h"
#include "simd/tile_products.h"

namespace chairlift {

// The arguments of a call.
struct Linear::Call {
  const float* row(int64_t index) const { return x + (row_ids ? row_ids[index] : index) * x_stride; }

  const float* x;
  int64_t x_stride, rows;
  float* out;
  int64_t out_stride;
  bool add;
  const int32_t* row_ids;
  const Linear* fed = nullptr;  // the layer whose gated prologue is computed with the outputs, or null
  const Activations* fed_activations = nullptr;  // those of the fed layer if the outputs are converted to them, or null
  bool has_prologue = true;                      // whether rows are given to the prologue of this layer
  const Activations* prepared = nullptr;         // the activations if they are complete, or null
};

namespace {

constexpr int64_t kRowsAtOnce = 4;  // prepared by a thread at a time, or a multiple of them
constexpr int64_t kMostLanes = 16;  // of vectors of any instruction set

}  // namespace

// The kernel of a part. All parts have the same activations, so they use kernels for many rows together.
const ProductKernel& Linear::kernel_of(const PackedMatrix& part, int64_t rows) const {
  const LinearTiles& tiles = isa().linear;
  const bool are_many = std::all_of(parts_.begin(), parts_.end(), [&](const auto& other) {
    const ProductKernel& kernel = tiles.of_many_rows[static_cast<int>(other->format())];
    return kernel.block_rows != 0 && rows >= kernel.min_rows;
  });
  return (are_many ? tiles.of_many_rows : tiles.products)[static_cast<int>(part.format())];
}

// The layout of the activations of all rows: the blocks, then the outliers of all blocks, then those of all rows, then the
// inputs that are outliers in many rows. The outliers have space for the largest possible number, of which little is
// touched.
struct Linear::Activations {
  Activations(const Linear& linear, int64_t rows)
      : tiles(isa().linear),
        kernel(linear.kernel_of(*linear.parts_[0], rows)),
        is_integer(chairlift::is_integer(linear.parts_[0]->format())),
        has_row_scale(chairlift::has_row_scale(linear.parts_[0]->format())),
        rows(rows),
        padded_inputs(linear.parts_[0]->padded_inputs()),
        num_blocks(divide_up(rows, kernel.block_rows)),
        rows_at_once(kernel.block_rows % kRowsAtOnce == 0 && (rows < kMinManyRows || has_lines(kernel.layout))
                         ? kRowsAtOnce
                         : kernel.block_rows),
        value_bytes(is_integer ? 1 : is_bf16(kernel.layout) ? 2 : 4),
        row_bytes(round_up(padded_inputs * value_bytes, has_lines(kernel.layout) ? kTileRowBytes : 1)) {
    values_bytes = row_bytes * kernel.block_rows;
    scales_bytes = is_integer ? (has_row_scale ? 1 : padded_inputs / kGroup) * kernel.block_rows * 4 : 0;
    const bool has_halves = std::any_of(linear.parts_.begin(), linear.parts_.end(), [](const auto& part) {
      return is_grouped(part->format()) && group_format(part->format()).group < kGroup;
    });
    halves_bytes = has_halves ? 2 * scales_bytes : 0;
    const auto has_factors = [](const auto& part) {
      return is_grouped(part->format()) && group_format(part->format()).scales == ScaleKind::factor;
    };
    has_supers = tiles.shares_super_scales && std::any_of(linear.parts_.begin(), linear.parts_.end(), has_factors);
    has_powers = !has_supers || !std::all_of(linear.parts_.begin(), linear.parts_.end(), has_factors);
    const int64_t row_scale_bytes = is_integer && !has_row_scale ? kernel.block_rows * 4 : 0;
    block_bytes = round_up(values_bytes + 3 * scales_bytes + halves_bytes + row_scale_bytes, 64);
    if (!is_integer) return;
    list_bytes = 4 * outlier_list_ints(padded_inputs);
    if (!has_channels()) return;
    outlier_bytes = kernel.block_rows * OutlierChannels::kMost;
    channel_bytes = static_cast<int64_t>(sizeof(OutlierChannels)) + padded_inputs;
  }

  size_t num_bytes() const {
    return static_cast<size_t>(num_blocks * (block_bytes + outlier_bytes + kernel.block_rows * list_bytes) +
                               channel_bytes);
  }

  Activations in(uint8_t* memory) const {
    Activations copy = *this;
    copy.data = memory;
    return copy;
  }

  ActivationBlock block(int64_t index) const {
    uint8_t* at = data + index * block_bytes;
    uint8_t* const scales = at + values_bytes;
    ActivationBlock block = {at,
                             reinterpret_cast<float*>(has_row_scale ? scales : scales + 3 * scales_bytes + halves_bytes),
                             reinterpret_cast<float*>(scales),
                             has_powers,
                             reinterpret_cast<int32_t*>(scales + scales_bytes),
                             scales + 2 * scales_bytes,
                             halves_bytes ? reinterpret_cast<int32_t*>(scales + 3 * scales_bytes) : nullptr,
                             row_outliers(index * kernel.block_rows), nullptr, nullptr, nullptr};
    if (!has_channels()) return block;
    block.num_outliers = &channels()->count;
    block.outliers = channels()->inputs;
    block.outlier_values = data + num_blocks * block_bytes + index * outlier_bytes;
    return block;
  }

  // The distance of rows in scratch memory, so that their columns are not in the same set of the first-level cache.
  int64_t scratch_row_bytes() const { return row_bytes + kTileRowBytes; }

  // Copies `count` inputs of rows of a block, from input `first` on, to their places. The rows are in the type of the
  // layout, `stride` bytes apart. first_row: an even number. Rows of words are copied by two or four, of which the last may
  // be behind num_rows.
  void place(const uint8_t* from, int64_t stride, int64_t first_row, int64_t num_rows, int64_t first, int64_t count) const {
    const int64_t row = first_row % kernel.block_rows, start = first * value_bytes, end = start + count * value_bytes;
    uint8_t* const values = data + first_row / kernel.block_rows * block_bytes;
    if (!has_lines(kernel.layout))
      return tiles.interleave_words(from, stride, static_cast<int>(num_rows), (end - start) / 4, kernel.block_rows,
                                    values + start * kernel.block_rows + row * 4);
    for (int64_t r = 0; r < num_rows; ++r)
      for (int64_t at = start, next; at < end; at = next) {
        next = std::min(round_up(at + 1, kTileRowBytes), end);
        uint8_t* const line = values + (at / kTileRowBytes * kernel.block_rows + row + r) * kTileRowBytes;
        const uint8_t* const source = from + r * stride + at - start;
        // A copy of constant size is compiled to moves instead of a call.
        if (next - at == kTileRowBytes) std::memcpy(line, source, kTileRowBytes);
        else std::memcpy(line + at % kTileRowBytes, source, static_cast<size_t>(next - at));
      }
  }

  // The tiles of inputs that are multiplied at a time, if not all of them are.
  int64_t tiles_at_once() const { return kernel.tiles_at_once(values_bytes, num_blocks); }
  bool splits_inputs() const { return kernel.tiles_at_once && tiles_at_once() * kTileRowBytes < row_bytes; }

  bool is_tiled() const { return kernel.layout == ActivationLayout::byte_tiles; }
  // Whether outliers remain in the lists of the rows, except at chosen inputs.
  bool has_channels() const { return is_tiled() && has_row_scale; }

  OutlierChannels* channels() const {
    return reinterpret_cast<OutlierChannels*>(row_outliers(num_blocks * kernel.block_rows));
  }
  uint8_t* channel_places() const { return reinterpret_cast<uint8_t*>(channels() + 1); }

  // The number of outliers of a row, their entries and their values.
  int32_t* row_outliers(int64_t row) const {
    return reinterpret_cast<int32_t*>(data + num_blocks * (block_bytes + outlier_bytes) + row * list_bytes);
  }

  const LinearTiles& tiles;
  const ProductKernel& kernel;
  bool is_integer, has_row_scale;
  bool has_supers = false, has_powers = true;  // see RowTarget
  int64_t rows, padded_inputs, num_blocks;
  int64_t rows_at_once;  // prepared by one thread: not less than share a cache line of the values
  int64_t value_bytes, row_bytes, values_bytes, scales_bytes, halves_bytes = 0, block_bytes;
  int64_t outlier_bytes = 0, list_bytes = 0, channel_bytes = 0;
  uint8_t* data = nullptr;
};

namespace {

Norm norm_of(Prologue prologue, std::vector<float> weight, std::vector<float> bias, float eps) {
  if (weight.empty() == is_norm(prologue)) throw std::invalid_argument("norm_weight must have in_features values");
  if (bias.size() != (prologue == Prologue::layer_norm ? weight.size() : 0))
    throw std::invalid_argument("norm_bias must have in_features values");
  return {is_norm(prologue) ? prologue : Prologue::none, std::move(weight), std::move(bias), eps};
}

bool has_parameters(Prologue prologue, size_t count) {
  return prologue == Prologue::xielu ? count == 4 : count == 0 || (is_gated(prologue) && count == 1);
}

}  // namespace

Linear::Linear(std::vector<std::shared_ptr<const PackedMatrix>> parts, std::vector<float> bias, Prologue prologue,
               std::vector<float> norm_weight, std::vector<float> norm_bias, float eps, std::vector<float> parameters)
    : Linear(std::move(parts), std::move(bias), prologue,
             norm_of(prologue, std::move(norm_weight), std::move(norm_bias), eps), std::move(parameters)) {}

Linear::Linear(std::vector<std::shared_ptr<const PackedMatrix>> parts, std::vector<float> bias, const Norm& norm)
    : Linear(std::move(parts), std::move(bias), norm.kind(), norm, {}) {}

Linear::Linear(std::vector<std::shared_ptr<const PackedMatrix>> parts, std::vector<float> bias, Prologue prologue,
               Norm norm, std::vector<float> parameters)
    : parts_(std::move(parts)), bias_(std::move(bias)), prologue_(prologue), norm_(std::move(norm)),
      parameters_(std::move(parameters)) {
  if (!has_parameters(prologue, parameters_.size()))
    throw std::invalid_argument("parameters must be four of xielu, at most one of gated prologues, and none of others");
  if (parts_.empty()) throw std::invalid_argument("a layer needs at least one matrix");
  for (const auto& part : parts_) {
    if (part->in_features() != parts_[0]->in_features())
      throw std::invalid_argument("all matrices of a layer must have the same in_features");
    if (part->input_order() != parts_[0]->input_order())
      throw std::invalid_argument("all matrices of a layer must have the same order of inputs");
    if (part->format() != parts_[0]->format() && !(is_grouped(part->format()) && is_grouped(parts_[0]->format())))
      throw std::invalid_argument(std::string("formats ") + name_of(parts_[0]->format()) + " and " +
                                  name_of(part->format()) + " cannot be multiplied as one layer");
  }
  const auto out = static_cast<size_t>(out_features());
  if (!bias_.empty() && bias_.size() != out) throw std::invalid_argument("bias must have out_features values");
  if (!norm_.fits(in_features())) throw std::invalid_argument("norm_weight must have in_features values");
  if (!bias_.empty()) bias_.resize(out + kStripe, 0.0f);  // the last stripe is read as a whole
}

PrologueArgs Linear::prologue_args() const {
  PrologueArgs args = norm_.args();
  args.kind = prologue_;
  if (!parameters_.empty()) args.parameters = parameters_.data();
  return args;
}

int64_t Linear::out_features() const {
  int64_t out = 0;
  for (const auto& part : parts_) out += part->out_features();
  return out;
}

namespace {

// The threshold of outliers, in multiples of the mean magnitude of their group, super-block or row: kMinOutlier or more. After
// a norm a few channels are always large, and their rounding affects every product of the layer. A gated activation has many
// large values, and each outlier takes time. docs/adr/0014 has the measurements.
float outlier_after(Prologue prologue, bool has_row_scale) {
  switch (prologue) {
    case Prologue::rms_norm:
    case Prologue::layer_norm: return has_row_scale ? 3.5f : 5;
    case Prologue::none: return has_row_scale ? 5 : 8;
    default: return has_row_scale ? 8 : 12;
  }
}

// The scratch memory of a thread that prepares rows: a row, the same row before its inputs are reordered, a count for each
// input, two numbers of each group, and the rows in the type of the layout.
struct PrepareScratch {
  PrepareScratch(uint8_t* memory, int64_t padded_inputs)
      : row(reinterpret_cast<float*>(memory)),
        computed(row + padded_inputs),
        indices(reinterpret_cast<int32_t*>(computed + padded_inputs)),
        magnitudes(reinterpret_cast<float*>(indices + padded_inputs)),
        values(reinterpret_cast<uint8_t*>(magnitudes + num_magnitudes(padded_inputs))) {}

  static size_t num_bytes(int64_t padded_inputs, int64_t value_bytes) {
    return static_cast<size_t>(round_up((3 * padded_inputs + num_magnitudes(padded_inputs)) * 4 + value_bytes, 64));
  }

  static int64_t num_magnitudes(int64_t padded_inputs) { return 2 * round_up(padded_inputs / kGroup, kMostLanes); }

  float* row;
  float* computed;
  int32_t* indices;
  float* magnitudes;
  uint8_t* values;
};

}  // namespace

// Computes the prologue of up to rows_at_once rows of one block, and writes the result in the layout that products read.
void Linear::prepare(const Call& call, const Activations& activations, int64_t first, uint8_t* memory) const {
  const LinearTiles& tiles = activations.tiles;
  const ProductKernel& kernel = activations.kernel;
  const int64_t inputs = parts_[0]->in_features(), padded = activations.padded_inputs;
  const int64_t row_bytes = activations.row_bytes, stride = activations.scratch_row_bytes();
  int64_t num_rows = std::min(activations.rows_at_once, call.rows - first);
  const ActivationBlock to = activations.block(first / kernel.block_rows);
  const std::vector<int32_t>& order = parts_[0]->input_order();
  PrologueArgs args = prologue_args();
  if (!call.has_prologue) args.kind = Prologue::none;
  const PrepareScratch scratch(memory, padded);
  const auto quantize = activations.has_row_scale ? tiles.quantize_row : tiles.quantize_groups;
  const bool is_read_in_place = args.kind == Prologue::none && order.empty() && inputs == padded;
  const int64_t end = first + num_rows;
  const bool has_grouped_bytes = kernel.layout == ActivationLayout::bytes && !activations.has_row_scale;
  if (has_grouped_bytes && call.rows > kRowsAtOnce && num_rows < activations.rows_at_once) {
    // Products of unpacked grouped weights compute whole blocks, so the missing rows must have values too.
    // Starts of zero would make denormals of integers, which take long.
    const int64_t bytes = 3 * activations.scales_bytes + activations.halves_bytes + kernel.block_rows * 4;
    std::memset(const_cast<float*>(to.start), 0, static_cast<size_t>(bytes));
    std::fill_n(const_cast<float*>(to.start), padded / kGroup * kernel.block_rows, kIntegerStart);
    num_rows = activations.rows_at_once;
    std::memset(scratch.values, 0, static_cast<size_t>(num_rows * stride));
  }
  for (int64_t r = first; r < end; ++r) {
    const float *row = call.row(r), *const next = r + 1 < call.rows ? call.row(r + 1) : row;
    if (!is_read_in_place) {
      tiles.prologue(args, row, next, inputs, order.empty() ? scratch.row : scratch.computed);
      for (size_t i = 0; i < order.size(); ++i) scratch.row[i] = scratch.computed[order[i]];
      for (int64_t i = inputs; i < padded; ++i) scratch.row[i] = 0;
      row = scratch.row;
    }
    uint8_t* const values = scratch.values + (r - first) * stride;
    if (kernel.convert) {
      kernel.convert(row, padded, values);
      continue;
    }
    std::memset(values + padded, 0, static_cast<size_t>(row_bytes - padded));
    OutlierList outliers;
    const RowTarget target = {const_cast<float*>(to.scale),
                              const_cast<float*>(to.start),
                              const_cast<int32_t*>(to.correction),
                              const_cast<void*>(to.sum),
                              const_cast<int32_t*>(to.half_correction),
                              scratch.magnitudes,
                              static_cast<int>(r % kernel.block_rows),
                              kernel.block_rows,
                              outlier_after(prologue_, activations.has_row_scale),
                              activations.has_supers,
                              activations.has_powers,
                              &outliers,
                              is_read_in_place ? next : row};
    int32_t* const list = activations.row_outliers(r);
    outliers.entries = list + 1;
    outliers.values = reinterpret_cast<uint32_t*>(list + 1 + max_row_outliers(padded));
    quantize(row, padded, reinterpret_cast<int8_t*>(values), target);
    *list = outliers.count;
  }
  activations.place(scratch.values, stride, first, num_rows, 0, row_bytes / activations.value_bytes);
}

// Chooses the inputs that are outliers in many rows, after all rows have been prepared.
void Linear::choose_channels(const Call& call, const Activations& activations, uint8_t* memory) const {
  const PrepareScratch scratch(memory, activations.padded_inputs);
  choose_outlier_channels(activations.row_outliers(0), call.rows, activations.padded_inputs, scratch.indices,
                          *activations.channels(), activations.channel_places());
}

void Linear::move_to_channels(const Call& call, const Activations& activations, int64_t block) const {
  if (activations.channels()->count == 0) return;
  const int64_t block_rows = activations.kernel.block_rows, first = block * block_rows;
  auto* dense = static_cast<int8_t*>(const_cast<void*>(activations.block(block).outlier_values));
  for (int64_t r = first; r < std::min(first + block_rows, call.rows); ++r, dense += OutlierChannels::kMost)
    move_to_dense(activations.channel_places(), activations.padded_inputs, activations.row_outliers(r), dense);
}

namespace {

// Tasks that threads of a job divide among each other; `run` returns when all of them are done.
class SharedTasks {
 public:
  explicit SharedTasks(int64_t num_tasks) : num_tasks_(num_tasks) {}

  template <typename Task>
  void run(const Task& task) {
    for (int64_t i; (i = next_.fetch_add(1)) < num_tasks_; done_.fetch_add(1)) task(i);
    spin_until([&] { return done_.load(std::memory_order_acquire) >= num_tasks_; });
  }

 private:
  int64_t num_tasks_;
  std::atomic<int64_t> next_{0}, done_{0};
};

}  // namespace

// Packed weights to be prefetched.
struct Linear::PrefetchRange {
  const uint8_t* at = nullptr;
  int64_t num_bytes = 0;

  // Always inlined, because GCC removes calls of functions that only prefetch.
  inline __attribute__((always_inline)) void prefetch() const {
    constexpr int64_t kMost = 64 << 10;
    for (int64_t i = 0; i < std::min(num_bytes, kMost); i += 64) __builtin_prefetch(at + i, 0, kSecondLevel);
  }
};

// Some consecutive stripes of one part of a layer.
struct Linear::Stripes {
  PrefetchRange weights() const { return {matrix->stripe(first), (end - first) * matrix->stripe_bytes()}; }

  const PackedMatrix* matrix;
  int64_t first, end;
  int64_t first_column;  // the output of the first stripe of the part
};

// The number of tiles of `at_once` stripes that contain outputs.
int64_t Linear::num_stripe_tiles(int64_t at_once) const {
  int64_t tiles = 0;
  for (const auto& part : parts_) tiles += divide_up(part->out_features(), at_once * kStripe);
  return tiles;
}

// Tile `index` of the stripes of all parts.
Linear::Stripes Linear::stripes_of(int64_t index, int64_t at_once) const {
  int64_t column = 0;
  for (const auto& part : parts_) {
    const int64_t tiles = divide_up(part->out_features(), at_once * kStripe);
    if (index < tiles)
      return {part.get(), index * at_once, std::min((index + 1) * at_once, part->num_stripes()), column};
    index -= tiles;
    column += part->out_features();
  }
  return {};
}

// Tile `index` of the stripes of the gate, and the stripes of the same outputs of up.
Linear::Stripes Linear::gate_of(int64_t index, int64_t at_once) const {
  return {parts_[0].get(), index * at_once, std::min((index + 1) * at_once, out_features() / 2 / kStripe), 0};
}

Linear::Stripes Linear::up_of(const Stripes& gate) const {
  const int64_t inner = out_features() / 2, before = parts_.size() == 1 ? inner / kStripe : 0;
  return {parts_.back().get(), before + gate.first, before + gate.end, before ? 0 : inner};
}

// The weights that a thread multiplies first, where all rows are in one tile.
Linear::PrefetchRange Linear::first_weights(int64_t rows, int64_t range, int64_t num_ranges) const {
  const int64_t at_once = kernel_of(*parts_[0], rows).tile_stripes;
  return stripes_of(num_stripe_tiles(at_once) * range / num_ranges, at_once).weights();
}

// The tiles of a product: as many stripes as the kernel computes at once, times as many blocks of rows as share their
// weights in the caches. Consecutive tiles have consecutive stripes.
struct Linear::Tiling {
  static constexpr int64_t kActivationBytes = 256 << 10;
  // The blocks of a tile, at least, where each thread has kThreadTiles or more of them: to read and unpack weights again
  // for fewer rows takes longer than to read rows with many inputs from beyond the second-level cache.
  static constexpr int64_t kSharingBlocks = 48, kThreadTiles = 4;

  // The products of stripes of a tile, at most, where ranges of inputs are multiplied. Fewer if threads had few tiles.
  static constexpr int64_t kRangeProducts = 8;

  Tiling(const Linear& linear, const Activations& activations, bool is_gate)
      : is_gate(is_gate),
        at_once(activations.kernel.tile_stripes * products_at_once(linear, activations)),
        stripe_tiles(is_gate ? divide_up(linear.out_features() / 2, at_once * kStripe) : linear.num_stripe_tiles(at_once)),
        blocks_at_once(even_part(activations.num_blocks, most_blocks(activations))),
        num_tiles(stripe_tiles * divide_up(activations.num_blocks, blocks_at_once)) {}

  static int64_t products_at_once(const Linear& linear, const Activations& activations) {
    if (!activations.splits_inputs()) return 1;
    const int64_t outputs_of_tile = kThreadTiles * Pool::get().num_threads() * activations.kernel.tile_stripes * kStripe;
    return std::clamp<int64_t>(linear.out_features() / outputs_of_tile, 1, kRangeProducts);
  }

  int64_t most_blocks(const Activations& activations) const {
    const auto row_blocks = activations.kernel.row_blocks;
    if (row_blocks) return row_blocks(activations.values_bytes);
    const int64_t least = stripe_tiles < kThreadTiles * Pool::get().num_threads() ? 1 : kSharingBlocks;
    return std::max(least, kActivationBytes / activations.block_bytes);
  }

  // The size of nearly equal parts of n, each at most `most` (but at least one).
  static int64_t even_part(int64_t n, int64_t most) { return divide_up(n, divide_up(n, std::max<int64_t>(most, 1))); }

  int64_t first_block(int64_t tile) const { return tile / stripe_tiles * blocks_at_once; }
  // The weights of the tile that follows, or none if it has the first stripes again.
  PrefetchRange weights_after(const Linear& linear, int64_t tile) const {
    const int64_t next = (tile + 1) % stripe_tiles;
    if (next == 0) return {};
    return (is_gate ? linear.gate_of(next, at_once) : linear.stripes_of(next, at_once)).weights();
  }

  bool is_gate;  // whether tiles have stripes of the gate, which is the first half of the outputs
  int64_t at_once;  // stripes of a tile
  int64_t stripe_tiles, blocks_at_once, num_tiles;
};

namespace {

// The stripes of a tile, unpacked to `memory` if enough blocks of rows multiply them.
struct TileStripes {
  TileStripes(const PackedMatrix& matrix, const ProductKernel& kernel, int64_t first, int64_t count, int64_t num_blocks,
              uint8_t* memory)
      : at(matrix.stripe(first)), stripe_bytes(matrix.stripe_bytes()), multiply(kernel.multiply) {
    if (!unpacks(kernel, num_blocks)) return;
    stripe_bytes = group_format(matrix.format()).unpacked_bytes(matrix.padded_inputs());
    for (int64_t s = 0; s < count; ++s)
      kernel.unpack(matrix.stripe(first + s), matrix.padded_inputs(), memory + s * stripe_bytes);
    at = memory;
    multiply = kernel.multiply_unpacked;
  }

  static bool unpacks(const ProductKernel& kernel, int64_t num_blocks) {
    return kernel.unpack && num_blocks >= kernel.min_unpacked_blocks;
  }

  // The bytes of `memory` for a tile of a part.
  static size_t num_bytes(const PackedMatrix& matrix, const ProductKernel& kernel, int64_t num_blocks) {
    if (!unpacks(kernel, num_blocks)) return 0;
    const int64_t bytes = group_format(matrix.format()).unpacked_bytes(matrix.padded_inputs());
    return static_cast<size_t>(kernel.tile_stripes * bytes);
  }

  const uint8_t* at;
  int64_t stripe_bytes;
  void (*multiply)(const StripeTask& task);
};

}  // namespace

// Stripes that are multiplied with some blocks of rows.
struct Linear::Product {
  Stripes stripes;
  PrefetchRange next;  // prefetched meanwhile, unless ranges of inputs are multiplied
  float* out;          // the output of the first block and stripe
  int64_t out_stride, num_columns, num_rows;
  bool add;
};

// Computes a tile of outputs with a range of the inputs at a time, which the blocks keep in the caches while all stripes are
// multiplied. Each task of a stripe prefetches one of the next.
void Linear::multiply_input_ranges(const Product& product, const Activations& activations, int64_t first_block,
                                   int64_t last_block, uint8_t* sums) const {
  const Stripes& stripes = product.stripes;
  const PackedMatrix& matrix = *stripes.matrix;
  const ProductKernel& kernel = activations.kernel;
  const int64_t num_tiles = activations.row_bytes / kTileRowBytes, most = activations.tiles_at_once();
  const int64_t num_blocks = last_block - first_block;
  ActivationBlock blocks[kMaxBlocks];
  for (int64_t i = 0; i < num_blocks; ++i) blocks[i] = activations.block(first_block + i);
  for (int64_t tile = 0; tile < num_tiles; tile += most) {
    const int64_t end = std::min(tile + most, num_tiles), range_bytes = (end - tile) * kTileBytes;
    uint8_t* sums_at = sums;
    for (int64_t stripe = stripes.first, step; stripe < stripes.end; stripe += step) {
      step = std::min<int64_t>(kernel.tile_stripes, stripes.end - stripe);
      const int64_t column = (stripe - stripes.first) * kStripe, at_once = divide_up(num_blocks, step);
      const int64_t next = stripe + step < stripes.end ? stripe + step : stripes.first;
      const int64_t next_tile = next == stripes.first ? end : tile, next_bytes = next_tile < num_tiles ? range_bytes : 0;
      const float* const bias = bias_.empty() ? nullptr : bias_.data() + stripes.first_column + stripe * kStripe;
      for (int64_t block = 0, s = 0; block < num_blocks; block += at_once, ++s) {
        const int64_t blocks_left = std::min(at_once, num_blocks - block), row = block * kernel.block_rows;
        const int64_t rows = std::min(blocks_left * kernel.block_rows, product.num_rows - row);
        kernel.multiply({matrix.stripe(stripe), step == 1 ? 0 : matrix.stripe_bytes(), static_cast<int>(step),
                         matrix.stripe(next + s) + next_tile * kTileBytes, next_bytes,
                         round_up(divide_up(range_bytes, blocks_left * (end - tile)), 64), matrix.padded_inputs(),
                         blocks + block, static_cast<int>(blocks_left), static_cast<int>(rows), bias,
                         product.out + row * product.out_stride + column, product.out_stride,
                         static_cast<int>(std::min(step * kStripe, product.num_columns - column)), product.add, tile, end,
                         sums_at});
        sums_at += blocks_left * kernel.sum_bytes;
      }
    }
  }
}

// Computes a tile of outputs, and prefetches the weights that its thread multiplies next, a share with each task. Reading
// and computing overlap, so that a product takes the longer of the two times and not their sum.
void Linear::multiply_stripes(const Product& product, const Activations& activations, int64_t first_block,
                              int64_t last_block, uint8_t* memory) const {
  if (activations.splits_inputs()) return multiply_input_ranges(product, activations, first_block, last_block, memory);
  const Stripes& stripes = product.stripes;
  const PrefetchRange& next = product.next;
  const PackedMatrix& matrix = *stripes.matrix;
  const ProductKernel& kernel = kernel_of(matrix, activations.rows);
  const int64_t count = stripes.end - stripes.first, block_rows = activations.kernel.block_rows;
  const int64_t at_once = std::min<int64_t>(activations.kernel.max_blocks, last_block - first_block);
  const int64_t share = round_up(divide_up(next.num_bytes, divide_up(last_block - first_block, at_once)), 64);
  const int64_t ahead_step = round_up(divide_up(share, at_once * matrix.padded_inputs() / kGroup), 64);
  const int64_t step = count < activations.kernel.tile_stripes ? 1 : count;
  ActivationBlock blocks[kMaxBlocks];
  for (int64_t stripe = stripes.first, column = 0; stripe < stripes.end; stripe += step, column += step * kStripe) {
    const TileStripes weights(matrix, kernel, stripe, step, last_block - first_block, memory);
    // Kernels of grouped weights read a whole tile: a single stripe again, because the memory may end behind it.
    const int64_t distance = step == 1 ? 0 : weights.stripe_bytes;
    const int64_t columns = std::min(step * kStripe, product.num_columns - column);
    const float* const bias = bias_.empty() ? nullptr : bias_.data() + stripes.first_column + stripe * kStripe;
    for (int64_t block = first_block, ahead = 0; block < last_block; block += at_once, ahead += share) {
      const int64_t num_blocks = std::min(at_once, last_block - block);
      for (int64_t i = 0; i < num_blocks; ++i) blocks[i] = activations.block(block + i);
      const int64_t row = (block - first_block) * block_rows, left = std::max<int64_t>(next.num_bytes - ahead, 0);
      weights.multiply({weights.at, distance, static_cast<int>(step),
                        next.at + std::min(ahead, next.num_bytes), std::min(share, left), ahead_step,
                        matrix.padded_inputs(), blocks, static_cast<int>(num_blocks),
                        static_cast<int>(std::min(num_blocks * block_rows, product.num_rows - row)), bias,
                        product.out + row * product.out_stride + column, product.out_stride, static_cast<int>(columns),
                        product.add});
    }
    if (!kernel.add_outliers) continue;
    blocks[0] = activations.block(first_block);
    kernel.add_outliers({matrix.stripe(stripe), step == 1 ? 0 : matrix.stripe_bytes(), static_cast<int>(step), nullptr, 0, 0,
                         matrix.padded_inputs(), blocks, 1, static_cast<int>(product.num_rows), nullptr,
                         product.out + column, product.out_stride, static_cast<int>(columns), true});
  }
}

// Computes a tile of the call. If a gated prologue follows, it is computed from the outputs of gate and then of up in
// `outputs`, and the result is converted to the activations of the fed layer if the call has them.
void Linear::multiply(const Call& call, const Activations& activations, const Tiling& tiling, int64_t tile,
                      const PrefetchRange& next, uint8_t* memory, float* outputs) const {
  const int64_t first_block = tiling.first_block(tile), first_row = first_block * activations.kernel.block_rows;
  const int64_t last_block = std::min(first_block + tiling.blocks_at_once, activations.num_blocks);
  const int64_t num_rows = std::min(last_block * activations.kernel.block_rows, call.rows) - first_row;
  const int64_t index = tile % tiling.stripe_tiles;
  const Stripes stripes = call.fed ? gate_of(index, tiling.at_once) : stripes_of(index, tiling.at_once);
  const int64_t column = stripes.first * kStripe, columns = (stripes.end - stripes.first) * kStripe;
  float* const out = call.out + first_row * call.out_stride + stripes.first_column + column;
  if (!call.fed) {
    const int64_t left = stripes.matrix->out_features() - column;
    return multiply_stripes({stripes, next, out, call.out_stride, std::min(columns, left), num_rows, call.add},
                            activations, first_block, last_block, memory);
  }
  const Stripes up = up_of(stripes);
  float* const of_up = outputs + num_rows * columns;
  multiply_stripes({stripes, up.weights(), outputs, columns, columns, num_rows, false}, activations, first_block, last_block,
                   memory);
  multiply_stripes({up, next, of_up, columns, columns, num_rows, false}, activations, first_block, last_block, memory);
  activations.tiles.prologue(call.fed->prologue_args(), outputs, outputs, num_rows * columns, outputs);
  if (!call.fed_activations) {
    for (int64_t row = 0; row < num_rows; ++row)
      std::memcpy(out + row * call.out_stride, outputs + row * columns, static_cast<size_t>(columns) * 4);
    return;
  }
  const Activations& to = *call.fed_activations;
  auto* const converted = reinterpret_cast<uint8_t*>(of_up);
  to.kernel.convert(outputs, num_rows * columns, converted);
  for (int64_t row = 0, count; row < num_rows; row += count) {
    count = std::min(to.rows_at_once - (first_row + row) % to.rows_at_once, num_rows - row);
    const int64_t stride = columns * to.value_bytes;
    to.place(converted + row * stride, stride, first_row + row, count, column, columns);
  }
}

void Linear::operator()(const float* x, int64_t x_stride, int64_t rows, float* out, int64_t out_stride, bool add,
                        const Linear* next, const int32_t* row_ids) const {
  run({x, x_stride, rows, out, out_stride, add, row_ids}, next);
}

bool Linear::can_feed(const Linear& down) const {
  const int64_t inner = out_features() / 2;
  return is_gated(down.prologue_) && inner == down.in_features() && inner % kStripe == 0 &&
         (parts_.size() == 1 || (parts_.size() == 2 && parts_[0]->out_features() == inner));
}

void Linear::feed(const Linear& down, const float* x, int64_t x_stride, int64_t rows, float* inner, int64_t inner_stride,
                  float* out, int64_t out_stride, bool add, const Linear* next, const int32_t* row_ids) const {
  thread_local ReusableMemory converted;
  if (!can_feed(down)) throw std::invalid_argument("the outputs must be gate and up of the gated prologue of `down`");
  if (rows <= 0) return;
  Activations activations(down, rows);
  // Integers need the largest value of a row before any value can be converted.
  const bool converts = activations.kernel.convert && down.in_features() == activations.padded_inputs &&
                        down.parts_[0]->input_order().empty();
  if (converts) activations.data = static_cast<uint8_t*>(converted.get(activations.num_bytes()));
  const Activations* const between = converts ? &activations : nullptr;
  run({x, x_stride, rows, inner, inner_stride, false, row_ids, &down, between}, &down);
  down.run({inner, inner_stride, rows, out, out_stride, add, nullptr, nullptr, nullptr, false, between}, next);
}

void Linear::each(const std::vector<Part>& parts, int64_t rows) {
  constexpr int64_t kFewRows = 64, kPartsPerThread = 4;
  Pool& pool = Pool::get();
  const auto num_parts = static_cast<int64_t>(parts.size());
  // Many rows of few layers are divided among all threads, of which some would be idle otherwise.
  if (rows > kFewRows && num_parts < kPartsPerThread * pool.num_threads()) {
    for (const Part& part : parts) (*part.layer)(part.x, part.x_stride, rows, part.out, part.out_stride, false);
    return;
  }
  pool.run(num_parts, [&](int64_t index, int worker) {
    const Part& part = parts[static_cast<size_t>(index)];
    const int64_t later = index + pool.num_threads();  // the part that this thread probably computes after this one
    const Linear* const next = later < num_parts ? parts[static_cast<size_t>(later)].layer : nullptr;
    part.layer->run({part.x, part.x_stride, rows, part.out, part.out_stride, false, nullptr}, next, worker);
  });
}

// A few rows are prepared by every thread separately, because waiting for another thread would take as long. More rows
// are divided among the threads, in memory of the calling thread. worker: the only thread, within a job of the pool.
void Linear::run(const Call& call, const Linear* next, int worker) const {
  thread_local ReusableMemory shared;
  const int64_t rows = call.rows;
  if (rows <= 0) return;
  const Activations layout(*this, rows);
  const Tiling tiling(*this, layout, call.fed != nullptr);
  const bool is_shared = rows > kRowsAtOnce && !call.prepared;
  auto* const memory = is_shared ? static_cast<uint8_t*>(shared.get(layout.num_bytes())) : nullptr;
  const size_t prepare_bytes =
      call.prepared ? 0 : PrepareScratch::num_bytes(layout.padded_inputs, layout.rows_at_once * layout.scratch_row_bytes());
  size_t tile_bytes = 0;
  for (const auto& part : parts_)
    tile_bytes = std::max(tile_bytes, TileStripes::num_bytes(*part, kernel_of(*part, rows), tiling.blocks_at_once));
  const int64_t products_at_once = divide_up(tiling.at_once, layout.kernel.tile_stripes);
  if (layout.splits_inputs())
    tile_bytes = static_cast<size_t>(tiling.blocks_at_once * products_at_once * layout.kernel.sum_bytes);
  const auto own_bytes = static_cast<size_t>(round_up(static_cast<int64_t>(layout.num_bytes()), 64));
  const size_t activation_bytes = is_shared || call.prepared ? 0 : own_bytes;
  const int64_t output_rows = tiling.blocks_at_once * layout.kernel.block_rows;
  const size_t output_bytes = call.fed ? static_cast<size_t>(output_rows * tiling.at_once * kStripe * 8) : 0;
  const size_t scratch_bytes = prepare_bytes + activation_bytes + tile_bytes + output_bytes;
  Pool& pool = Pool::get();
  Ranges tiles(pool, tiling.num_tiles, worker == kAllThreads ? pool.num_threads() : 1);
  const bool has_channels = is_shared && layout.has_channels();
  SharedTasks preparations(divide_up(rows, layout.rows_at_once)), choices(has_channels);
  SharedTasks moves(has_channels ? layout.num_blocks : 0);
  const auto run_range = [&](int64_t range, int its_worker) {
    // Allocation may throw, so it precedes the wait for other threads.
    auto* const scratch = static_cast<uint8_t*>(pool.scratch(its_worker, scratch_bytes));
    const Activations activations =
        call.prepared ? *call.prepared : layout.in(is_shared ? memory : scratch + prepare_bytes);
    const auto prepare_rows = [&](int64_t i) { prepare(call, activations, i * layout.rows_at_once, scratch); };
    first_weights(rows, range, tiles.count()).prefetch();
    if (is_shared) {
      preparations.run(prepare_rows);
      choices.run([&](int64_t) { choose_channels(call, activations, scratch); });
      moves.run([&](int64_t block) { move_to_channels(call, activations, block); });
    } else if (!call.prepared) {
      prepare_rows(0);
      if (layout.has_channels()) activations.channels()->count = 0;
    }
    if (layout.kernel.begin) layout.kernel.begin();
    tiles.take(range, [&](int64_t tile, int64_t its_range, bool is_last) {
      PrefetchRange ahead = is_last ? PrefetchRange{} : tiling.weights_after(*this, tile);
      if (is_last && next) ahead = next->first_weights(rows, its_range, tiles.count());
      uint8_t* const tile_memory = scratch + prepare_bytes + activation_bytes;
      multiply(call, activations, tiling, tile, ahead, tile_memory, reinterpret_cast<float*>(tile_memory + tile_bytes));
    });
    if (layout.kernel.end) layout.kernel.end();
  };
  if (worker == kAllThreads) pool.run(tiles.count(), run_range);
  else run_range(0, worker);
}

}  // namespace chairlift
