#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "runtime/pool.h"
#include "sampling/sampling.h"

namespace nb = nanobind;

namespace chairlift {
namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Samples tokens for requests whose parameters are arrays with one element per row. The caller owns the arrays; each
// call reads their current values.
class TokenSampler {
 public:
  TokenSampler(Array<const uint8_t> is_random, Array<const float> temperature, Array<const int64_t> top_k,
               Array<const double> top_p, Array<const float> min_p, Array<const uint64_t> keys,
               Array<const int64_t> positions)
      : is_random_(is_random),
        temperature_(temperature),
        top_k_(top_k),
        top_p_(top_p),
        min_p_(min_p),
        keys_(keys),
        positions_(positions),
        num_rows_(is_random.shape(0)) {
    for (const size_t size : {temperature.shape(0), top_k.shape(0), top_p.shape(0), min_p.shape(0), keys.shape(0),
                              positions.shape(0)})
      if (size != num_rows_) throw nb::value_error("the parameter arrays must have the same length");
  }

  void sample(uintptr_t logits, int64_t vocab_size, Array<const int64_t> rows, Array<int64_t> out) const {
    const int64_t count = static_cast<int64_t>(rows.shape(0));
    if (out.shape(0) != rows.shape(0)) throw nb::value_error("rows and out must have the same length");
    for (int64_t i = 0; i < count; ++i)
      if (static_cast<uint64_t>(rows(i)) >= num_rows_)
        throw nb::index_error("rows must be indices into the parameter arrays");
    const float* const values = reinterpret_cast<const float*>(logits);
    const int64_t* const row_of = rows.data();
    int64_t* const tokens = out.data();
    const nb::gil_scoped_release release;
    Pool& pool = Pool::get();
    const size_t scratch_bytes = sampling_scratch_bytes(vocab_size);
    pool.run(count, [&](int64_t i, int worker) {
      const int64_t row = row_of[i];
      const float* const own = values + i * vocab_size;
      tokens[i] = is_random_.data()[row] ? draw_token(own, vocab_size, params(row), pool.scratch(worker, scratch_bytes))
                                         : argmax_token(own, vocab_size);
    });
  }

 private:
  DrawParams params(int64_t row) const {
    return {temperature_.data()[row], top_k_.data()[row], top_p_.data()[row], min_p_.data()[row],
            uniform_at(keys_.data()[row], positions_.data()[row])};
  }

  Array<const uint8_t> is_random_;
  Array<const float> temperature_;
  Array<const int64_t> top_k_;
  Array<const double> top_p_;
  Array<const float> min_p_;
  Array<const uint64_t> keys_;
  Array<const int64_t> positions_;
  size_t num_rows_;
};

void mask_rows(uintptr_t logits, int64_t vocab_size, Array<const int64_t> rows, Matrix<const uint32_t> masks) {
  if (masks.shape(0) != rows.shape(0) || masks.shape(1) != static_cast<size_t>((vocab_size + 31) / 32))
    throw nb::value_error("masks must have one row for each of rows, and ceil(vocab_size / 32) columns");
  float* const values = reinterpret_cast<float*>(logits);
  const int64_t words = static_cast<int64_t>(masks.shape(1));
  const nb::gil_scoped_release release;
  for (size_t i = 0; i < rows.shape(0); ++i)
    mask_tokens(values + rows.data()[i] * vocab_size, vocab_size, masks.data() + static_cast<int64_t>(i) * words);
}

void logprobs(uintptr_t logits, int64_t vocab_size, Array<const int64_t> tokens, Matrix<int64_t> ids,
              Matrix<float> values, Matrix<int64_t> ranks) {
  const size_t count = tokens.shape(0), columns = ids.shape(1);
  if (ids.shape(0) != count || values.shape(0) != count || ranks.shape(0) != count)
    throw nb::value_error("ids, logprobs and ranks must have one row for each of tokens");
  if (columns < 1 || columns - 1 > static_cast<size_t>(vocab_size) || values.shape(1) != columns ||
      ranks.shape(1) != columns)
    throw nb::value_error("ids, logprobs and ranks must have 1 + num_top columns, with num_top at most vocab_size");
  for (size_t i = 0; i < count; ++i)
    if (static_cast<uint64_t>(tokens(i)) >= static_cast<uint64_t>(vocab_size))
      throw nb::index_error("tokens must be from 0 to vocab_size - 1");
  const float* const rows = reinterpret_cast<const float*>(logits);
  const nb::gil_scoped_release release;
  Pool& pool = Pool::get();
  const size_t scratch_bytes = sampling_scratch_bytes(vocab_size);
  pool.run(static_cast<int64_t>(count), [&](int64_t i, int worker) {
    const int64_t at = i * static_cast<int64_t>(columns);
    token_logprobs(rows + i * vocab_size, vocab_size, tokens.data()[i], static_cast<int64_t>(columns) - 1,
                   ids.data() + at, values.data() + at, ranks.data() + at, pool.scratch(worker, scratch_bytes));
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<TokenSampler>(m, "TokenSampler",
                           R"(Samples tokens for requests whose parameters are arrays with one element per row.

The arrays are not copied: each call of `sample` reads their current values.

Args:
    is_random: uint8 [num_rows], 0 for the likeliest token.
    temperature: float32 [num_rows], positive.
    top_k: int64 [num_rows], 0 keeps all tokens.
    top_p: float64 [num_rows] in (0, 1], 1 keeps all tokens.
    min_p: float32 [num_rows] in [0, 1], 0 keeps all tokens.
    keys: uint64 [num_rows], the random stream of each row.
    positions: int64 [num_rows], the position of the token in its sequence; with the key it determines the draw.

Raises:
    ValueError: The arrays differ in length.)")
      .def(nb::init<Array<const uint8_t>, Array<const float>, Array<const int64_t>, Array<const double>,
                    Array<const float>, Array<const uint64_t>, Array<const int64_t>>(),
           nb::arg("is_random").noconvert(), nb::arg("temperature").noconvert(), nb::arg("top_k").noconvert(),
           nb::arg("top_p").noconvert(), nb::arg("min_p").noconvert(), nb::arg("keys").noconvert(),
           nb::arg("positions").noconvert())
      .def("sample", &TokenSampler::sample, nb::arg("logits_ptr"), nb::arg("vocab_size"), nb::arg("rows"),
           nb::arg("out").noconvert(), R"(Sample one token from each row of logits.

Args:
    logits_ptr: float32 [len(rows), vocab_size].
    vocab_size: The number of tokens.
    rows: int64 [len(rows)], the row of the parameters for each row of logits.
    out: int64 [len(rows)], overwritten with the token ids.

Raises:
    ValueError: rows and out differ in length.
    IndexError: A row is out of range.)");
  m.def("mask_rows", &mask_rows, nb::arg("logits_ptr"), nb::arg("vocab_size"), nb::arg("rows").noconvert(),
        nb::arg("masks").noconvert(), R"(Set the logits of tokens that are not allowed to minus infinity.

Args:
    logits_ptr: float32 [num_logit_rows, vocab_size], overwritten.
    vocab_size: The number of tokens.
    rows: int64 [n], rows of the logits; not checked.
    masks: uint32 [n, ceil(vocab_size / 32)], one bit per token, the lowest bit of a word first; 1 allows the token.

Raises:
    ValueError: masks has another shape.)");
  m.def("logprobs", &logprobs, nb::arg("logits_ptr"), nb::arg("vocab_size"), nb::arg("tokens"),
        nb::arg("ids").noconvert(), nb::arg("logprobs").noconvert(), nb::arg("ranks").noconvert(),
        R"(Compute the logprobs and ranks of one given token and of the likeliest tokens in each row.

Args:
    logits_ptr: float32 [n, vocab_size].
    vocab_size: The number of tokens.
    tokens: int64 [n], the given tokens.
    ids: int64 [n, 1 + num_top], overwritten: the given token, then the likeliest tokens.
    logprobs: float32 [n, 1 + num_top], overwritten.
    ranks: int64 [n, 1 + num_top], overwritten; the likeliest token has rank 1.

Raises:
    ValueError: The arrays differ in length or number of columns, or num_top exceeds vocab_size.
    IndexError: A token id is out of range.)");
}

}  // namespace chairlift
