#include <algorithm>
#include <cstring>
#include <memory>

#include "linear/ggml_blocks.h"
#include "linear/linear.h"
#include "linear/outlier_channels.h"
#include "linear/tile_blocking.h"
#include "runtime/caches.h"
#include "runtime/halves.h"
#include "runtime/isa.h"
#include "runtime/pool.h"
#include "tests/check.h"

namespace chairlift::test {
namespace {

constexpr WeightFormat kRounded[] = {WeightFormat::q4_0, WeightFormat::q4_1, WeightFormat::q8_0, WeightFormat::int8,
                                     WeightFormat::bf16, WeightFormat::f16,  WeightFormat::f32};
const std::vector<Prologue> kPrologues = {
    Prologue::none, Prologue::rms_norm, Prologue::layer_norm, Prologue::silu, Prologue::gelu, Prologue::gelu_tanh,
    Prologue::relu, Prologue::relu2, Prologue::xielu, Prologue::silu_and_mul, Prologue::gelu_and_mul,
    Prologue::gelu_tanh_and_mul, Prologue::relu_and_mul, Prologue::relu2_and_mul, Prologue::swigluoai_and_mul};

struct Case {
  WeightFormat format;
  Prologue prologue;
  int64_t rows, inputs, outputs;
  bool has_bias, add;

  int64_t width() const { return is_gated(prologue) ? 2 * inputs : inputs; }
  bool has_norm() const { return is_norm(prologue); }
  std::string name() const {
    return std::string(name_of(format)) + ", prologue " + std::to_string(static_cast<int>(prologue)) + ", " +
           std::to_string(rows) + " x " + std::to_string(inputs) + " x " + std::to_string(outputs);
  }
};

// The parameters of an activation: the factor of a gate, or those of xielu.
std::vector<float> parameters_of(Prologue prologue) {
  if (prologue == Prologue::xielu) return {0.4f, -0.3f, 0.5f, -1e-6f};
  return prologue == Prologue::gelu_and_mul || prologue == Prologue::silu_and_mul ? std::vector<float>{0.7f}
                                                                                   : std::vector<float>{};
}

// An activation without its gate, in double.
double activated(Prologue prologue, double x) {
  switch (prologue) {
    case Prologue::silu:
    case Prologue::silu_and_mul: return x / (1 + std::exp(-x));
    case Prologue::gelu:
    case Prologue::gelu_and_mul: return x * std::erfc(-x / std::sqrt(2.0)) / 2;
    case Prologue::gelu_tanh:
    case Prologue::gelu_tanh_and_mul:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Prologue::relu:
    case Prologue::relu_and_mul: return std::max(x, 0.0);
    case Prologue::relu2:
    case Prologue::relu2_and_mul: return std::max(x, 0.0) * std::max(x, 0.0);
    case Prologue::swigluoai_and_mul: return std::min(x, 7.0) / (1 + std::exp(-1.702 * std::min(x, 7.0)));
    case Prologue::xielu: {
      const std::vector<float> values = parameters_of(prologue);
      const double positive = std::log1p(std::exp(values[0])), negative = values[2] + std::log1p(std::exp(values[1]));
      return values[2] * x + (x > 0 ? positive * x * x : negative * (std::expm1(std::min<double>(x, values[3])) - x));
    }
    default: return x;
  }
}

// The prologue of one row, in double.
std::vector<double> prepared(const Case& c, const float* x, const std::vector<float>& weight,
                             const std::vector<float>& bias, float eps) {
  const auto n = static_cast<size_t>(c.inputs);
  std::vector<double> y(x, x + n);
  double mean = 0, squares = 0;
  if (c.prologue == Prologue::layer_norm)
    for (const double value : y) mean += value / static_cast<double>(n);
  for (const double value : y) squares += (value - mean) * (value - mean) / static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) {
    if (c.has_norm()) y[i] = (y[i] - mean) / std::sqrt(squares + eps) * weight[i];
    if (c.prologue == Prologue::layer_norm) y[i] += bias[i];
    if (is_gated(c.prologue)) {
      const std::vector<float> factor = parameters_of(c.prologue);
      const double up = x[n + i];
      y[i] = activated(c.prologue, factor.empty() ? y[i] : factor[0] * y[i]);
      y[i] *= c.prologue == Prologue::swigluoai_and_mul ? std::clamp<double>(up, -7, 7) + 1 : up;
    } else if (!c.has_norm()) {
      y[i] = activated(c.prologue, y[i]);
    }
  }
  return y;
}

struct Expected {
  double value, tolerance;
};

// The inputs that share a scale, or the last of them.
int64_t inputs_of_scale(const Case& c) {
  if (has_row_scale(c.format)) return c.inputs;
  const bool has_factors = is_grouped(c.format) && group_format(c.format).scales == ScaleKind::factor;
  return has_factors && isa().linear.shares_super_scales ? kSuperBlock : kGroup;
}

// Values in double, with the sum and the largest of the magnitudes of the inputs of each scale.
struct Operand {
  Operand(const Case& c, std::vector<double> of) : values(std::move(of)) {
    const int64_t size = inputs_of_scale(c);
    for (int64_t first = 0; first < c.inputs; first += size) add_group(values.data() + first, std::min(size, c.inputs - first));
  }

  UNCHECKED void add_group(const double* x, int64_t n) {
    double sum = 0, most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double magnitude = x[i] < 0 ? -x[i] : x[i];
      sum += magnitude;
      most = most < magnitude ? magnitude : most;
    }
    sums.push_back(sum);
    largest.push_back(most);
  }

  std::vector<double> values, sums, largest;
};

// The product in double. Integer formats may be off by half a step of each input's eight bits, where a step is the
// largest magnitude of the inputs of its scale over 127, or up to twice of that in groups, whose scales are powers of two times
// that of the row. Products of bfloat16 round inputs to it. The rest is float rounding.
Expected product(const Case& c, const Operand& inputs, const Operand& weights) {
  const double size = static_cast<double>(inputs_of_scale(c));
  const auto groups = static_cast<int64_t>(weights.sums.size());
  const double rounding = dot(weights.sums.data(), inputs.largest.data(), groups) / 254;
  const double magnitudes = 3 * size * dot(weights.largest.data(), inputs.largest.data(), groups);
  const bool rounds_to_bf16 = is_bf16(isa().linear.products[static_cast<int>(c.format)].layout);
  const bool has_powers = is_grouped(c.format) && inputs_of_scale(c) == kGroup;
  const double steps = is_integer(c.format) ? (has_powers ? 2.02 : 1.01) : rounds_to_bf16 ? 1 : 0;
  return {dot(inputs.values.data(), weights.values.data(), c.inputs), steps * rounding + 4e-6 * magnitudes + 1e-6};
}

std::vector<float> run(const Linear& linear, const Case& c, const std::vector<float>& x,
                       const std::vector<float>& before) {
  std::vector<float> out = before;
  linear(x.data(), c.width(), c.rows, out.data(), c.outputs, c.add);
  return out;
}

bool same_bits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}

// Checks that single rows, another number of threads and another order of tiles give the same bits. Of many rows these
// are every seventh, which have all positions in a block. Single rows have no races.
void check_invariance(const Linear& linear, const Case& c, const std::vector<float>& x,
                      const std::vector<float>& before, const std::vector<float>& out) {
  for (int64_t row = 0; row < (kOnlyRaces ? 0 : c.rows); row += c.rows < 20 ? 1 : 7) {
    const std::vector<float> own(x.begin() + row * c.width(), x.begin() + (row + 1) * c.width());
    const std::vector<float> own_before(before.begin() + row * c.outputs, before.begin() + (row + 1) * c.outputs);
    Case alone = c;
    alone.rows = 1;
    CHECK(same_bits(run(linear, alone, own, own_before).data(), out.data() + row * c.outputs, c.outputs));
  }
  Pool& pool = Pool::get();
  const int num_threads = pool.num_threads();
  pool.set_num_threads(num_threads % 3 + 1);
  pool.set_tile_order(static_cast<uint64_t>(c.rows * 31 + c.inputs));
  CHECK(same_bits(run(linear, c, x, before).data(), out.data(), c.rows * c.outputs));
  pool.set_tile_order(0);
}

// Checks rows with a stride: memory between them is neither read nor written.
void check_strides(const Linear& linear, const Case& c, const std::vector<float>& x, const std::vector<float>& before,
                   const std::vector<float>& out) {
  const int64_t x_stride = c.width() + 5, out_stride = c.outputs + 3;
  std::vector<float> apart(static_cast<size_t>((c.rows - 1) * x_stride + c.width()), NAN);
  std::vector<float> result(static_cast<size_t>((c.rows - 1) * out_stride + c.outputs), 7.0f);
  for (int64_t row = 0; row < c.rows; ++row) {
    std::copy_n(x.data() + row * c.width(), c.width(), apart.data() + row * x_stride);
    std::copy_n(before.data() + row * c.outputs, c.outputs, result.data() + row * out_stride);
  }
  linear(apart.data(), x_stride, c.rows, result.data(), out_stride, c.add);
  for (int64_t row = 0; row < c.rows; ++row) {
    CHECK(same_bits(result.data() + row * out_stride, out.data() + row * c.outputs, c.outputs));
    if (row + 1 == c.rows) break;
    for (int64_t i = c.outputs; i < out_stride; ++i) CHECK(result[static_cast<size_t>(row * out_stride + i)] == 7.0f);
  }
}

// Random bytes with scales of normal size. Each block has its halves (or exponent) at the start or the end.
std::vector<uint8_t> random_blocks(WeightFormat format, int64_t num_bytes, Random& random) {
  std::vector<uint8_t> bytes = random.bytes(num_bytes);
  const int64_t size = block_bytes(format);
  const bool is_last = format == WeightFormat::q2_k || format == WeightFormat::q3_k || format == WeightFormat::q6_k;
  const int64_t header = group_format(format).has_minimum ? 4 : 2;
  for (int64_t at = 0; at < num_bytes; at += size) {
    if (format == WeightFormat::mxfp4) {
      bytes[static_cast<size_t>(at)] = static_cast<uint8_t>(120 + random.below(8));
      continue;
    }
    for (int64_t i = 0; i < header; i += 2)
      write_half(bytes.data() + at + (is_last ? size - header : 0) + i, random.normal() / 64);
  }
  return bytes;
}

// Random bytes, and scales of normal size.
std::vector<uint8_t> random_f8_rows(const Case& c, int64_t row_bytes, Random& random) {
  std::vector<uint8_t> bytes = random.bytes(c.outputs * row_bytes);
  for (int64_t row = 0; row < c.outputs; ++row)
    for (int64_t at = c.inputs; at < row_bytes; at += 4) {
      const float scale = random.normal() / 64;
      std::memcpy(bytes.data() + row * row_bytes + at, &scale, 4);
    }
  return bytes;
}

// The numbers 0 to n - 1 in another order.
std::vector<int32_t> random_order(int64_t n, Random& random) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  for (int64_t i = n - 1; i > 0; --i)
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
  return order;
}

// The values in the order in which products multiply them.
template <typename T>
std::vector<T> reordered(const T* values, int64_t n, const std::vector<int32_t>& order) {
  std::vector<T> result(values, values + n);
  for (size_t i = 0; i < order.size(); ++i) result[i] = values[order[i]];
  return result;
}

void check_case(const Case& c, Random& random) {
  subject() = c.name();
  auto matrix = std::make_shared<PackedMatrix>(c.format, c.outputs, c.inputs);
  const int64_t row_bytes = matrix->source_row_bytes();
  if (c.format == WeightFormat::f8_e4m3)
    matrix->pack_blocks(0, c.outputs, random_f8_rows(c, row_bytes, random).data(), row_bytes);
  else if (is_grouped(c.format) && !can_round(c.format))
    matrix->pack_blocks(0, c.outputs, random_blocks(c.format, c.outputs * row_bytes, random).data(), row_bytes);
  else
    matrix->pack_floats(0, c.outputs, random.normals(c.outputs * c.inputs).data(), c.inputs);
  if (random.below(4) == 0) matrix->set_input_order(random_order(c.inputs, random));
  std::vector<float> unpacked(static_cast<size_t>(c.outputs * c.inputs));
  matrix->unpack(0, c.outputs, unpacked.data());

  const std::vector<float> bias = random.normals(c.has_bias ? c.outputs : 0);
  const std::vector<float> norm_weight = random.normals(c.has_norm() ? c.inputs : 0);
  const std::vector<float> norm_bias = random.normals(c.prologue == Prologue::layer_norm ? c.inputs : 0);
  constexpr float kEps = 1e-5f;
  const Linear linear({matrix}, bias, c.prologue, norm_weight, norm_bias, kEps, parameters_of(c.prologue));

  std::vector<float> x = random.normals(c.rows * c.width());
  for (int64_t i = 0; i < c.rows * c.width() / 20; ++i) x[static_cast<size_t>(random.below(c.rows * c.width()))] *= 30;
  for (int64_t i = 0; i < c.width() / 40; ++i) {
    const int64_t channel = random.below(c.width());
    for (int64_t row = 0; row < c.rows; ++row) x[static_cast<size_t>(row * c.width() + channel)] *= 20;
  }
  const std::vector<float> before = random.normals(c.rows * c.outputs);
  const std::vector<float> out = run(linear, c, x, before);
  std::vector<Operand> rows;
  for (int64_t row = 0; row < c.rows; ++row) {
    const std::vector<double> y = prepared(c, x.data() + row * c.width(), norm_weight, norm_bias, kEps);
    rows.emplace_back(c, reordered(y.data(), c.inputs, matrix->input_order()));
  }
  for (int64_t o = 0; o < c.outputs; ++o) {
    const std::vector<float> own = reordered(unpacked.data() + o * c.inputs, c.inputs, matrix->input_order());
    const Operand weights(c, {own.begin(), own.end()});
    for (int64_t row = 0; row < c.rows; ++row) {
      const auto at = static_cast<size_t>(row * c.outputs + o);
      const Expected expected = product(c, rows[static_cast<size_t>(row)], weights);
      const double rest = (c.has_bias ? bias[static_cast<size_t>(o)] : 0) + (c.add ? before[at] : 0);
      CHECK(near(out[at], expected.value + rest, expected.tolerance + 1e-6 * std::fabs(rest)));
    }
  }
  check_invariance(linear, c, x, before, out);
  check_strides(linear, c, x, before, out);
}

// The kernel of a layer of one matrix, see Linear::kernel_of.
const ProductKernel& kernel_of(WeightFormat format, int64_t rows) {
  const ProductKernel& of_many = isa().linear.of_many_rows[static_cast<int>(format)];
  const bool is_many = of_many.block_rows != 0 && rows >= of_many.min_rows;
  return is_many ? of_many : isa().linear.products[static_cast<int>(format)];
}

// The kernels of an instruction set with functions that were not tested on another one.
class NewKernels {
 public:
  NewKernels() {
    for (int i = 0; i < kNumWeightFormats; ++i) {
      LinearTiles own = isa().linear;
      for (int other = 0; other < kNumWeightFormats; ++other) own.products[other] = own.of_many_rows[other] = ProductKernel{};
      for (const ProductKernel* kernel : {&isa().linear.products[i], &isa().linear.of_many_rows[i]}) {
        own.products[i] = *kernel;
        if (is_new(own)) found_.push_back(kernel);
      }
    }
  }

  bool has(WeightFormat format, int64_t rows) const {
    return std::find(found_.begin(), found_.end(), &kernel_of(format, rows)) != found_.end();
  }

 private:
  std::vector<const ProductKernel*> found_;
};

// Only races need few formats: one of each way in which threads share rows, weights and memory.
std::vector<WeightFormat> tested_formats() {
  using W = WeightFormat;
  if (kOnlyRaces) return {W::q4_0, W::q6_k, W::int8, W::bf16};
  std::vector<W> all;
  for (int i = 0; i < kNumWeightFormats; ++i) all.push_back(static_cast<W>(i));
  return all;
}

// A format has all numbers of rows, inputs and outputs, in other combinations than the format before.
void check_products(Random& random, const NewKernels& kernels) {
  const Sizes rows = sizes({1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 43}, {1, 4, 17});
  const Sizes inputs = {1, 300, 33, 7, 64, 200, 31, 32, 100}, outputs = {70, 1, 17, 130, 33, 16, 15, 7};
  size_t next = 0;
  for (const WeightFormat format : tested_formats()) {
    const int64_t multiple = is_grouped(format) && !can_round(format) ? block_inputs(format) : 1;
    // A prologue does not depend on the format of the weights.
    const auto check = [&](int64_t num_rows, int64_t width, int64_t num_outputs) {
      if (kernels.has(format, num_rows))
        check_case({format, random.among(kPrologues), num_rows, round_up(width, multiple), num_outputs, random.below(2) == 1,
                    random.below(2) == 1},
                   random);
    };
    for (const int64_t num_rows : rows) {
      check(num_rows, inputs[next % inputs.size()], outputs[next % outputs.size()]);
      ++next;
    }
    check(2, 2100, 17);
    check(5, 2100, 33);
  }
}

std::shared_ptr<PackedMatrix> random_matrix(WeightFormat format, int64_t outputs, int64_t inputs, Random& random) {
  auto matrix = std::make_shared<PackedMatrix>(format, outputs, inputs);
  const int64_t row_bytes = matrix->source_row_bytes();
  if (is_grouped(format) && !can_round(format))
    matrix->pack_blocks(0, outputs, random_blocks(format, outputs * row_bytes, random).data(), row_bytes);
  else
    matrix->pack_floats(0, outputs, random.normals(outputs * inputs).data(), inputs);
  return matrix;
}

// A layer of gate and up, and the layer with the gated prologue that it feeds.
struct Feed {
  WeightFormat up, down;
  Prologue gate;
  int64_t rows, inputs, inner;
  bool has_parts;  // whether gate and up are two matrices

  std::string name() const {
    return std::string("feed ") + name_of(up) + " to " + name_of(down) + ", gate " + std::to_string(static_cast<int>(gate)) +
           ", rows " + std::to_string(rows) + ", inputs " + std::to_string(inputs) + (has_parts ? ", two parts" : "");
  }
};

// Checks that a gated prologue gives the same bits with the outputs of the layer before as with their rows.
void check_feed(const Feed& feed, Random& random) {
  constexpr int64_t kOutputs = 33;
  subject() = feed.name();
  const int64_t rows = feed.rows, inputs = feed.inputs, inner = feed.inner;
  std::vector<std::shared_ptr<const PackedMatrix>> parts = {
      random_matrix(feed.up, feed.has_parts ? inner : 2 * inner, inputs, random)};
  // Products of Q6_K have no kernel for many rows where those of Q4_K have one.
  const WeightFormat second = feed.up == WeightFormat::q4_k ? WeightFormat::q6_k
                              : is_grouped(feed.up)         ? WeightFormat::q8_0
                                                            : feed.up;
  if (feed.has_parts) parts.push_back(random_matrix(second, inner, inputs, random));
  const Linear up(parts, random.normals(2 * inner), Prologue::rms_norm, random.normals(inputs), {}, 1e-5f);
  const Linear down({random_matrix(feed.down, kOutputs, inner, random)}, {}, feed.gate, {}, {}, 0, parameters_of(feed.gate));
  CHECK(up.can_feed(down));
  const std::vector<float> x = random.normals(rows * inputs);
  std::vector<float> outputs(static_cast<size_t>(rows * 2 * inner)), fed(outputs.size() / 2);
  std::vector<float> expected(static_cast<size_t>(rows * kOutputs)), out(expected.size());
  up(x.data(), inputs, rows, outputs.data(), 2 * inner, false);
  down(outputs.data(), 2 * inner, rows, expected.data(), kOutputs, false);
  up.feed(down, x.data(), inputs, rows, fed.data(), inner, out.data(), kOutputs, false);
  CHECK(same_bits(out.data(), expected.data(), rows * kOutputs));
}

void check_feeds(Random& random, const NewKernels& kernels) {
  using W = WeightFormat;
  const std::vector<W> formats = kOnlyRaces ? std::vector<W>{W::q4_0, W::int8, W::bf16}
                                            : std::vector<W>{W::q4_k, W::q4_0, W::int8, W::bf16, W::f32};
  for (const W format : formats)
    for (const int64_t rows : sizes({1, 4, 7, 40, 70}, {1, 40}))
      for (const bool has_parts : {false, true}) {
        const auto gate = random.among<Prologue>({Prologue::silu_and_mul, Prologue::gelu_and_mul, Prologue::swigluoai_and_mul});
        const bool is_large = format == W::q4_k;
        if (kernels.has(format, rows)) check_feed({format, format, gate, rows, is_large ? 256 : 96, is_large ? 256 : 160, has_parts}, random);
      }
  Pool::get().set_num_threads(3);
  // Two tiles of 19 blocks of four rows, so that the second one starts in the middle of a block of eight rows.
  if (kernels.has(W::q4_0, 150) || kernels.has(W::bf16, 150))
    check_feed({W::q4_0, W::bf16, Prologue::silu_and_mul, 150, 2048, 64, false}, random);
  // Two tiles of four blocks of 32 rows on emulated tiles, so that the second one starts in the middle of a block of six rows.
  set_second_level_cache(128 << 10);
  if (kernels.has(W::bf16, 200)) check_feed({W::bf16, W::f32, Prologue::silu_and_mul, 200, 256, 64, false}, random);
  set_second_level_cache(0);
  const Linear odd({random_matrix(WeightFormat::f32, 40, 8, random)}, {}, Prologue::none, {}, {}, 0);
  const Linear gated({random_matrix(WeightFormat::f32, 8, 20, random)}, {}, Prologue::silu_and_mul, {}, {}, 0);
  CHECK(!odd.can_feed(gated));  // 20 outputs of the gate are not whole stripes
}

// Many rows, in small caches, so that they are multiplied in several parts.
void check_many_rows(Random& random, const NewKernels& kernels) {
  using W = WeightFormat;
  for (const W format : {W::int8, W::bf16, W::q4_0, W::q6_k})
    for (const int64_t num_rows : sizes({23, 97, 150}, {23, 150})) {
      const int64_t num_inputs = num_rows == 23 ? 512 : num_rows == 150 ? 256 : is_grouped(format) ? 768 : 736;
      if (!kernels.has(format, num_rows)) continue;
      for (const int64_t cache : kernel_of(format, num_rows).row_blocks ? Sizes{64 << 10, 256 << 10} : Sizes{0}) {
        set_second_level_cache(cache);
        check_case({format, Prologue::rms_norm, num_rows, num_inputs, 70, true, random.below(2) == 1}, random);
      }
    }
  // Ranges of inputs of an odd number of stripes, of which a thread multiplies several, and a last task with one row.
  Pool::get().set_num_threads(1);
  set_second_level_cache(64 << 10);
  for (const W format : {W::int8, W::bf16})
    if (kernels.has(format, 97)) check_case({format, Prologue::none, 97, 1024, 300, true, true}, random);
  set_second_level_cache(0);
  // Tiles unpack eight groups of inputs at a time, with and without minimums.
  for (const W format : tested_formats()) {
    const bool has_all = format == W::q4_0 || format == W::q4_1;
    for (const int64_t num_rows : {64, 81})
      if (is_grouped(format) && kernels.has(format, num_rows))
        for (const int64_t num_inputs : num_rows == 64 ? Sizes{96, 576} : Sizes{352, 32})
          if (has_all || num_inputs == 96 || num_inputs == 352)
            check_case({format, Prologue::none, num_rows, round_up(num_inputs, block_inputs(format)), 40, true, random.below(2) == 1}, random);
  }
  // Two tiles of 25 blocks of rows with one thread, which has four tiles of outputs, and more tiles with two threads.
  Pool::get().set_num_threads(1);
  const ProductKernel& kernel = kernel_of(W::q4_0, kMinManyRows);
  if (kernels.has(W::q4_0, kMinManyRows))
    check_case({W::q4_0, Prologue::none, 50 * kernel.block_rows, 2720, 64 * kernel.tile_stripes, false, false}, random);
}

// The numbers of blocks that were measured on a CPU with these caches.
void check_tile_blocks() {
  const auto blocks = [](int64_t row_bytes) { return tile_blocks(kTiledBlockRows * row_bytes, 2 << 20); };
  CHECK(blocks(512) == 8);
  CHECK(blocks(2048) == 8);
  CHECK(blocks(8192) == 4);
  CHECK(blocks(16384) == 4);
  const auto parts = [](int64_t row_bytes, int64_t num_blocks) {
    const int64_t tiles = row_bytes / kTileRowBytes;
    return divide_up(tiles, tiles_at_once(kTiledBlockRows * row_bytes, num_blocks, 2 << 20));
  };
  CHECK(parts(8192, 16) == 1);
  CHECK(parts(16384, 16) == 2);
  CHECK(parts(16384, 2) == 1);
  CHECK(parts(28672, 16) == 4);
}

// Rows whose inputs 8, 9 and 11 are outliers, and one of the others in each row.
void check_outlier_channels() {
  constexpr int64_t kInputs = 96, kRows = 200, kInts = outlier_list_ints(kInputs);
  std::vector<int32_t> lists(kRows * kInts), counts(kInputs);
  for (int64_t row = 0; row < kRows; ++row) {
    OutlierList list = {0, lists.data() + row * kInts + 1, nullptr};
    list.values = reinterpret_cast<uint32_t*>(list.entries + max_row_outliers(kInputs));
    list.append(2, 0x05000201);
    list.append(3 + row % 21, 0x00070000);
    lists[static_cast<size_t>(row * kInts)] = list.count;
  }
  OutlierChannels chosen;
  std::vector<uint8_t> places(kInputs);
  choose_outlier_channels(lists.data(), kRows, kInputs, counts.data(), chosen, places.data());
  CHECK(chosen.count == 3 + 21 && places[8] == 0 && places[9] == 1 && places[10] == OutlierChannels::kNone && places[11] == 2);
  places[14] = OutlierChannels::kNone;
  int8_t dense[OutlierChannels::kMost];
  move_to_dense(places.data(), kInputs, lists.data(), dense);
  CHECK(dense[0] == 1 && dense[1] == 2 && dense[2] == 5 && dense[3] == 0);
  const StoredOutliers left(lists.data(), kInputs);
  CHECK(left.count == 1 && left.entries[0] == 3 && left.values[0] == 0x00070000);
  // Few rows do not pay for the gathering of weights.
  choose_outlier_channels(lists.data(), 8, kInputs, counts.data(), chosen, places.data());
  CHECK(chosen.count == 0);
}

// A row of a file in the format, with scales of normal size, and its values.
struct FileRow {
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};

// One block of 32 values: scale, minimum (q4_1), values.
void fill_block(WeightFormat format, uint8_t* block, float* values, Random& random) {
  const bool is_q8 = format == WeightFormat::q8_0;
  const int header = format == WeightFormat::q4_1 ? 4 : 2;
  const float scale = half_to_float(float_to_half(random.normal() / 16));
  const float minimum = format == WeightFormat::q4_1 ? half_to_float(float_to_half(random.normal())) : 0;
  write_half(block, scale);
  if (format == WeightFormat::q4_1) write_half(block + 2, minimum);
  for (int i = 0; i < kGroup; ++i) {
    const uint8_t byte = block[header + (is_q8 ? i : i % 16)];
    const int nibble = i < 16 ? byte & 15 : byte >> 4;
    const int value = is_q8 ? static_cast<int8_t>(byte) : format == WeightFormat::q4_0 ? nibble - 8 : nibble;
    values[i] = scale * static_cast<float>(value) + minimum;
  }
}

FileRow file_row(WeightFormat format, int64_t inputs, int64_t num_bytes, Random& random) {
  FileRow row = {random.bytes(num_bytes), {}};
  if (is_grouped(format)) {
    const int64_t groups = (inputs + kGroup - 1) / kGroup;
    row.values.resize(static_cast<size_t>(groups * kGroup));
    for (int64_t g = 0; g < groups; ++g)
      fill_block(format, row.bytes.data() + g * (num_bytes / groups), row.values.data() + g * kGroup, random);
    return row;
  }
  if (format == WeightFormat::int8) {
    const float scale = random.normal();
    std::memcpy(row.bytes.data() + inputs, &scale, 4);
    for (int64_t k = 0; k < inputs; ++k)
      row.values.push_back(scale * static_cast<float>(static_cast<int8_t>(row.bytes[static_cast<size_t>(k)])));
    return row;
  }
  for (int64_t k = 0; k < inputs; ++k) {
    const float value = random.normal();
    const uint16_t half = format == WeightFormat::f16 ? float_to_half(value) : float_to_brain(value);
    if (format == WeightFormat::f32)
      std::memcpy(row.bytes.data() + 4 * k, &value, 4);
    else
      std::memcpy(row.bytes.data() + 2 * k, &half, 2);
    row.values.push_back(format == WeightFormat::f32   ? value
                         : format == WeightFormat::f16 ? half_to_float(half)
                                                       : brain_to_float(half));
  }
  return row;
}

// Checks that products use exactly the values of a file, for rows that are packed in pieces and rows gathered by id.
void check_packing(Random& random) {
  for (const WeightFormat format : kRounded) {
    for (const int64_t inputs : {1, 31, 32, 33, 96}) {
      subject() = std::string("packing ") + name_of(format) + ", inputs " + std::to_string(inputs);
      constexpr int64_t kRows = 19;
      PackedMatrix matrix(format, kRows, inputs);
      std::vector<FileRow> rows;
      for (int64_t row = 0; row < kRows; ++row) {
        rows.push_back(file_row(format, inputs, matrix.source_row_bytes(), random));
        matrix.pack_blocks(row, 1, rows.back().bytes.data(), matrix.source_row_bytes());
      }
      const std::vector<int64_t> ids = {18, 0, 7, 7, 15, 16};
      std::vector<float> found(ids.size() * static_cast<size_t>(inputs));
      matrix.gather(ids.data(), static_cast<int64_t>(ids.size()), found.data());
      for (size_t i = 0; i < ids.size(); ++i)
        CHECK(same_bits(found.data() + i * static_cast<size_t>(inputs), rows[static_cast<size_t>(ids[i])].values.data(),
                        inputs));
      std::vector<float> middle(static_cast<size_t>(4 * inputs));
      matrix.unpack(14, 4, middle.data());
      for (size_t i = 0; i < 4; ++i)
        CHECK(same_bits(middle.data() + i * static_cast<size_t>(inputs), rows[14 + i].values.data(), inputs));
    }
  }
}

}  // namespace

void test_linear() {
  Random random(1);
  check_tile_blocks();
  check_outlier_channels();
  check_packing(random);
  const NewKernels kernels;
  check_many_rows(random, kernels);
  check_feeds(random, kernels);
  check_products(random, kernels);
}

}  // namespace chairlift::test
