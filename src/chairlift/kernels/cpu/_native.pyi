"""
Native kernels for the CPU: linear layers, attention over paged KV memory, recurrences, and sampling.

A parameter whose name ends in `_ptr` is the address of the first element of an array in host memory. The caller
guarantees its shape and dtype, which are not checked, and keeps the array alive until the call returns. All other arrays
are NumPy arrays in C order, whose shape and dtype are checked.
"""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray

def isa() -> str:
    """
    Return the name of the instruction set in use.

    Raises:
        RuntimeError: CHAIRLIFT_CPU_ISA names an instruction set that this CPU does not have.
    """

def available_isas() -> list[str]:
    """Return the instruction sets of this CPU that have kernels, best first."""

def set_isa(name: str) -> None:
    """
    Change the instruction set of this process, in tests and benchmarks.

    Raises:
        RuntimeError: This CPU does not have the instruction set.
    """

def set_num_threads(num_threads: int) -> None:
    """
    Set how many threads compute, from 1 to 256, including the calling thread.

    Raises:
        ValueError: The number is out of range.
    """

def num_threads() -> int:
    """Return how many threads compute, including the calling thread."""

def set_tile_order(seed: int) -> None:
    """
    Distribute tiles to threads in a random order that depends on the seed, in tests; 0 is the ascending order.
    """

class PackedMatrix:
    """
    A weight matrix [out_features, in_features] in the layout that products read.

    Args:
        format: The storage format: "int8", "f8_e4m3", "bf16", "f16", "f32", a block type of ggml in lower case ("q4_0",
            "q4_1", "q5_0", "q5_1", "q8_0", "q2_k" to "q6_k", "iq4_nl", "iq4_xs" or "mxfp4"), or "u4_g32", "u4_g128" or
            "u8_g32" with integer zero points.
        out_features, in_features: The shape.

    Raises:
        ValueError: The format is unknown, the shape has no rows or no columns, or the format has blocks of 128 or 256 inputs and
            in_features is not a multiple.
    """

    def __init__(self, format: str, out_features: int, in_features: int) -> None: ...
    def pack_blocks(
        self,
        first_row: int,
        rows: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Write rows from the bytes of a file in this format.

        Args:
            first_row: The first row of the matrix that is written.
            rows: uint8 [num_rows, row_bytes]: blocks as in GGUF files, or plain values; in "int8" signed bytes and the scale
                of the row, in "f8_e4m3" bytes and the scale of each 128 inputs, in float32. A block with a zero point is the
                scale in float16, the zero point in a byte, and the values, of which each 32 of four bits are stored as in q4_0.

        Raises:
            ValueError: The rows are outside the matrix, or do not have row_bytes bytes each.
        """

    def pack_floats(
        self,
        first_row: int,
        rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Write rows from floats, rounded to the format.

        Args:
            first_row: The first row of the matrix that is written.
            rows: float32 [num_rows, in_features].

        Raises:
            ValueError: The rows are outside the matrix, do not have in_features values each, or cannot be rounded to the
                format.
        """

    def pack_bfloat16(
        self,
        first_row: int,
        rows: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Write rows from bfloat16, rounded to the format.

        Args:
            first_row: The first row of the matrix that is written.
            rows: uint16 [num_rows, in_features], the bits of bfloat16.

        Raises:
            ValueError: The rows are outside the matrix, do not have in_features values each, or cannot be rounded to the
                format.
        """

    def set_input_order(self, order: Sequence[int]) -> None:
        """
        Set the order of the columns as they were packed.

        Args:
            order: For each packed column the input that it multiplies, in_features distinct numbers.

        Raises:
            ValueError: A number is missing, repeated or out of range.
        """

    def unpack(self, first_row: int, num_rows: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """
        Return the values of rows as products use them: float32 [num_rows, in_features].

        Raises:
            ValueError: The rows are outside the matrix.
        """

    def gather(self, ids_ptr: int, num_ids: int, out_ptr: int) -> None:
        """
        Copy rows by id, as floats.

        Args:
            ids_ptr: int64 [num_ids], each from 0 to out_features - 1; not checked.
            num_ids: The number of ids.
            out_ptr: float32 [num_ids, in_features], overwritten.
        """

    @property
    def format(self) -> str:
        """The storage format."""

    @property
    def out_features(self) -> int:
        """The number of rows."""

    @property
    def in_features(self) -> int:
        """The number of columns."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row for `pack_blocks`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix in memory, including padding."""

class FusedLinear:
    """
    A linear layer over rows of float32: out = [out +] prologue(x) @ matrix.T + bias.

    Args:
        parts: Matrices with the same input in the same order, whose outputs follow each other; the layer keeps them alive.
            Their formats are equal, or all of them have blocks.
        bias: float32 [out_features], copied; None adds nothing.
        prologue: The function of each row before the product: "none", "rms_norm", "layer_norm", "silu", "gelu",
            "gelu_tanh", "relu", "relu2", "xielu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "relu_and_mul",
            "relu2_and_mul" or "swigluoai_and_mul".
        norm_weight: float32 [in_features], copied; for "rms_norm" and "layer_norm".
        norm_bias: float32 [in_features], copied; for "layer_norm".
        eps: The constant that both norms add to the variance.
        parameters: The factor of the gate of a gated prologue, or nothing; alpha_p, alpha_n, beta and eps of "xielu".

    Raises:
        ValueError: The prologue is unknown, a vector is missing or has another length, or the matrices do not fit.
    """

    @overload
    def __init__(
        self,
        parts: Sequence[PackedMatrix],
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        prologue: str = "none",
        norm_weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        norm_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        eps: float = 0.0,
        parameters: Sequence[float] = [],
    ) -> None: ...
    @overload
    def __init__(
        self,
        parts: Sequence[PackedMatrix],
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
        norm: Norm,
    ) -> None:
        """
        The same with a norm, or none, whose weights are shared with other layers.
        """

    def __call__(self, x_ptr: int, x_stride: int, num_rows: int, out_ptr: int, out_stride: int, add: bool) -> None:
        """
        Compute the layer for all rows.

        Args:
            x_ptr: float32 [num_rows, in_features], or [num_rows, 2 * in_features] for prologues whose names end in "_and_mul".
            x_stride: The distance between rows of x, in floats.
            num_rows: The number of rows.
            out_ptr: float32 [num_rows, out_features], without overlap with x.
            out_stride: The distance between rows of out, in floats.
            add: Whether the result is added to the values in out, instead of replacing them.
        """

    def can_feed(self, down: FusedLinear) -> bool:
        """
        Return whether `feed` can compute this layer and then `down`.

        The prologue of `down` must be gated, and this layer must have its gate and up values as outputs, as multiples of 16.
        """

    def feed(
        self,
        down: FusedLinear,
        x_ptr: int,
        x_stride: int,
        num_rows: int,
        inner_ptr: int,
        inner_stride: int,
        out_ptr: int,
        out_stride: int,
        add: bool,
    ) -> None:
        """
        Compute this layer and then `down`, with the bits of two calls.

        The gated prologue of `down` is computed with the outputs of this layer while they are in the caches.

        Args:
            down: The layer that follows.
            x_ptr: float32 [num_rows, in_features] of this layer.
            x_stride: The distance between rows of x, in floats.
            num_rows: The number of rows.
            inner_ptr: float32 [num_rows, in_features of down], which may be overwritten.
            inner_stride: The distance between rows of inner, in floats.
            out_ptr: float32 [num_rows, out_features of down], without overlap with the others.
            out_stride: The distance between rows of out, in floats.
            add: Whether the result is added to the values in out, instead of replacing them.

        Raises:
            ValueError: The layers do not fit, see `can_feed`.
        """

def multiply_each(
    layers: Sequence[FusedLinear], inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]], num_rows: int
) -> None:
    """
    Compute layers that do not depend on each other, each on one thread if that leaves no thread idle.

    Args:
        layers: One or more layers.
        inputs: For each layer the address of x, as in `FusedLinear`, and the distance between its rows in floats.
        outputs: The same of out, which is overwritten.
        num_rows: The number of rows of every layer.

    Raises:
        ValueError: The numbers of layers, inputs and outputs differ, or are zero.
    """

class Norm:
    """
    A norm of rows, or none.

    Args:
        kind: "none", "rms_norm" or "layer_norm".
        weight: float32 [size], copied; None for "none".
        bias: float32 [size], copied; for "layer_norm".
        eps: The constant that both norms add to the variance.

    Raises:
        ValueError: The kind is unknown or no norm, or a vector is missing or has another length.
    """

    def __init__(
        self,
        kind: str,
        weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        eps: float = 0.0,
    ) -> None: ...

class ResidualSum:
    """
    The sum of the residual stream and a branch.

    It is scale * of_sum(stream + multiplier * after(branch)).

    Args:
        after: The norm of the branch; copied.
        of_sum: The norm of the sum; copied.
        multiplier: The factor of the branch.
        scale: The factor of the result.
    """

    def __init__(self, after: Norm, of_sum: Norm, multiplier: float, scale: float = 1.0) -> None: ...
    def __call__(
        self, stream_ptr: int, stream_stride: int, branch_ptr: int, branch_stride: int, num_rows: int, size: int
    ) -> None:
        """
        Compute the sum for all rows, in the memory of the stream.

        Args:
            stream_ptr: float32 [num_rows, size], overwritten with the result.
            stream_stride, branch_stride: The distance between rows, in floats.
            branch_ptr: float32 [num_rows, size], whose values are lost; 0 adds nothing.
            num_rows: The number of rows.
            size: The values of a row.

        Raises:
            ValueError: The weights of a norm have another size.
        """

def gate(
    x_ptr: int,
    x_stride: int,
    logits_ptr: int,
    logits_stride: int,
    num_rows: int,
    size: int,
    num_gates: int,
    activation: str,
) -> None:
    """
    Multiply rows by activation(logits), in their memory.

    Args:
        x_ptr: float32 [num_rows, size], overwritten with the product.
        x_stride, logits_stride: The distance between rows, in floats.
        logits_ptr: float32 [num_rows, num_gates]. Each logit is that of size / num_gates consecutive values.
        num_rows: The number of rows.
        size: The values of a row.
        num_gates: The number of logits of a row.
        activation: "sigmoid" or "softplus".

    Raises:
        ValueError: The activation is unknown, or num_gates does not divide size.
    """

class ExpertMixture:
    """
    A mixture of experts: out = the sum of weight * down(up(x)) over the chosen experts of a row.

    Args:
        router: The layer of the logits, with one output for each expert.
        up, down: The layers of each expert, kept alive. The prologue of `up` is usually a norm, and that of `down` the
            activation.
        experts_per_token: The number of experts with the largest scores that compute a row.
        of_chosen: Whether weights are the scores of the chosen experts divided by their sum, or the scores.
        expert_scales: float32 [num_experts], copied, the factors of the weights; None for no factors.
        has_sigmoid: Whether a score is the sigmoid of a logit instead of the softmax over all logits.
        sum_eps: Is added to the sum of the scores of the chosen experts, unless it is a softmax without selection_bias.
        sum_min: The least number by which such scores are divided.
        scale: The factor of all weights.
        selection_bias: float32 [num_experts], copied, is added to the scores for the choice only; None for no bias.
        num_groups: The number of equal groups of consecutive experts.
        groups_per_token: The number of groups with the largest scores, from which the experts of a row are chosen. The
            score of a group is that of its best expert, or with `has_sigmoid` the sum of those of its best two.

    Raises:
        ValueError: The layers or groups do not fit, or there are fewer experts than experts_per_token.
    """

    def __init__(
        self,
        router: FusedLinear,
        up: Sequence[FusedLinear],
        down: Sequence[FusedLinear],
        experts_per_token: int,
        of_chosen: bool,
        expert_scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        has_sigmoid: bool = False,
        sum_eps: float = 0.0,
        sum_min: float = 0.0,
        scale: float = 1.0,
        selection_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        num_groups: int = 1,
        groups_per_token: int = 1,
    ) -> None: ...
    def __call__(
        self,
        routed_ptr: int,
        routed_stride: int,
        x_ptr: int,
        x_stride: int,
        num_rows: int,
        out_ptr: int,
        out_stride: int,
    ) -> None:
        """
        Compute the mixture for all rows.

        Args:
            routed_ptr: float32 [num_rows, in_features of the router].
            routed_stride: The distance between rows of routed, in floats.
            x_ptr: float32 [num_rows, in_features of the experts], which may be the same.
            x_stride: The distance between rows of x, in floats.
            num_rows: The number of rows.
            out_ptr: float32 [num_rows, in_features of the experts], overwritten, without overlap with x.
            out_stride: The distance between rows of out, in floats.
        """

class LoraBatch:
    """The LoRA adapters of the rows of a step."""

    def __init__(self) -> None: ...
    def set_slots(self, slots_ptr: int, num_rows: int) -> None:
        """
        Set the adapters of the rows of the next calls.

        Args:
            slots_ptr: int64 [num_rows], the adapter slot of each row, or -1 for none.
            num_rows: The number of rows.
        """

class LoraLinear:
    """
    The LoRA adapters of a linear layer: out += (prologue(x) @ a.T) @ b for rows with an adapter.

    Args:
        batch: The adapters of the rows.
        base: The layer, whose prologue this one has too.
        max_rank: The number of rows of a and b of each adapter slot.
        parts: For consecutive outputs of the layer the addresses of a, float32 [slots, max_rank, in_features], of b, float32
            [slots, max_rank, outputs], and of the ranks, int32 [slots]; and the number of outputs. A rank of 0 adds nothing.
            The caller keeps the arrays alive.

    Raises:
        ValueError: The outputs of the parts are not those of the layer.
    """

    def __init__(
        self, batch: LoraBatch, base: FusedLinear, max_rank: int, parts: Sequence[tuple[int, int, int, int]]
    ) -> None: ...
    def __call__(self, x_ptr: int, x_stride: int, num_rows: int, out_ptr: int, out_stride: int) -> None:
        """
        Add the products of the adapters.

        Args:
            x_ptr: The input of the base layer, float32.
            x_stride: The distance between rows of x, in floats.
            num_rows: The number of rows, that of the batch.
            out_ptr: float32 [num_rows, out_features], the result of the base layer.
            out_stride: The distance between rows of out, in floats.

        Raises:
            ValueError: The batch has adapters and another number of rows.
        """

class AttentionStep:
    """
    The sequences, block tables and slots of one step, copied from its metadata.

    The work is divided among threads when a layer first uses the step, once for each sliding window.

    Args:
        query_start_loc: int32 [num_seqs + 1], ascending from 0 to num_tokens.
        seq_lens: int32 [num_seqs], the keys of each sequence once those of the step are written.
        block_tables: int32 [num_seqs, max_blocks], block ids.
        slot_mapping: int64 [num_tokens], the slot of each token's K and V; -1 writes nothing.
        block_size: Slots per block.

    Raises:
        ValueError: The arrays do not fit together.
    """

    def __init__(
        self,
        query_start_loc: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        seq_lens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        block_tables: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        slot_mapping: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        block_size: int,
    ) -> None: ...
    @property
    def shared_keys(self) -> list[int]:
        """
        The number of first keys of each sequence that layers without a window compute with other sequences.
        """

def set_shares_keys(shares_keys: bool, most_state_floats: int = 33554432) -> None:
    """
    Whether later steps compute keys that sequences share once for all of them, as long as their states have at most so many floats. It changes no result; for tests and measurements. The default is True.
    """

class PagedAttention:
    """
    Norm, rotary embedding, KV writes and attention of the layers of a model.

    Args:
        num_heads: Query heads, a multiple of num_kv_heads.
        num_kv_heads: Heads of K and V.
        head_dim: Values per head: a multiple of 4, at most 576.
        scale: The factor of the dot products.
        kv_dtype: The type of K and V in memory: "f32", "bf16" or "int8".
        soft_cap: c where a score s becomes c * tanh(s / c) before the softmax; 0 leaves scores as they are.

    Raises:
        ValueError: A number is out of range, or the type is unknown.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, kv_dtype: str, soft_cap: float = 0.0
    ) -> None: ...
    def forward(
        self,
        qkv_ptr: int,
        step: AttentionStep,
        q_norm_ptr: int,
        k_norm_ptr: int,
        norm_eps: float,
        norms_values: bool,
        norms_rotated: bool,
        kv_projections: int,
        positions_ptr: int,
        cos_sin_cache_ptr: int,
        rotary_dim: int,
        query_scales_ptr: int,
        key_ptr: int,
        value_ptr: int,
        key_scale_ptr: int,
        value_scale_ptr: int,
        window: int,
        sinks_ptr: int,
        out_ptr: int,
    ) -> None:
        """
        Compute one layer for all tokens of a step.

        Addresses may be 0 only where stated.

        Args:
            qkv_ptr: float32 [num_tokens, (num_heads + kv_projections * num_kv_heads) * head_dim], overwritten.
            step: The step; its tokens are the rows of qkv.
            q_norm_ptr, k_norm_ptr: float32 [head_dim], weights of RMSNorm over each head; 0 for no norm.
            norm_eps: The constant that RMSNorm adds to the mean square.
            norms_values: Whether each head of V has an RMSNorm, without a weight.
            norms_rotated: Whether the norms of query and key follow the rotary embedding, instead of preceding it.
            kv_projections: 2 for keys and values; 1 if the projected keys are the values as well; 0 if another layer has
                written K and V of this step.
            positions_ptr: int64 [num_tokens]; 0 without rotary embedding.
            cos_sin_cache_ptr: float32 [max_position, rotary_dim], the cosines of each position, then its sines; 0 without
                rotary embedding.
            rotary_dim: The number of first dimensions of each head that are rotated: even, at most head_dim.
            query_scales_ptr: float32 [max_position], a factor of the scores of the query at each position; 0 for no factors.
                It requires positions_ptr.
            key_ptr, value_ptr: [num_blocks + 1, num_kv_heads, block_size, head_dim], of the type of K and V. If they are
                equal, the keys after their norm and rotation are the values.
            key_scale_ptr, value_scale_ptr: float32 [num_blocks + 1, num_kv_heads, block_size]; 0 unless the type is int8.
            window: Keys that a query sees, including its own; 0 for all up to its own.
            sinks_ptr: float32 [num_heads], a score of each head that is part of its softmax, but has no value; 0 for none.
            out_ptr: float32 [num_tokens, num_heads * head_dim], overwritten.
        """

class TokenSampler:
    """
    Samples tokens for requests whose parameters are arrays with one element per row.

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
        ValueError: The arrays differ in length.
    """

    def __init__(
        self,
        is_random: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        temperature: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        top_k: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        top_p: Annotated[NDArray[numpy.float64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        min_p: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def sample(
        self,
        logits_ptr: int,
        vocab_size: int,
        rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """
        Sample one token from each row of logits.

        Args:
            logits_ptr: float32 [len(rows), vocab_size].
            vocab_size: The number of tokens.
            rows: int64 [len(rows)], the row of the parameters for each row of logits.
            out: int64 [len(rows)], overwritten with the token ids.

        Raises:
            ValueError: rows and out differ in length.
            IndexError: A row is out of range.
        """

def mask_rows(
    logits_ptr: int,
    vocab_size: int,
    rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    masks: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
) -> None:
    """
    Set the logits of tokens that are not allowed to minus infinity.

    Args:
        logits_ptr: float32 [num_logit_rows, vocab_size], overwritten.
        vocab_size: The number of tokens.
        rows: int64 [n], rows of the logits; not checked.
        masks: uint32 [n, ceil(vocab_size / 32)], one bit per token, the lowest bit of a word first; 1 allows the token.

    Raises:
        ValueError: masks has another shape.
    """

def logprobs(
    logits_ptr: int,
    vocab_size: int,
    tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order="C", device="cpu")],
    logprobs: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ranks: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order="C", device="cpu")],
) -> None:
    """
    Compute the logprobs and ranks of one given token and of the likeliest tokens in each row.

    Args:
        logits_ptr: float32 [n, vocab_size].
        vocab_size: The number of tokens.
        tokens: int64 [n], the given tokens.
        ids: int64 [n, 1 + num_top], overwritten: the given token, then the likeliest tokens.
        logprobs: float32 [n, 1 + num_top], overwritten.
        ranks: int64 [n, 1 + num_top], overwritten; the likeliest token has rank 1.

    Raises:
        ValueError: The arrays differ in length or number of columns, or num_top exceeds vocab_size.
        IndexError: A token id is out of range.
    """

def measure_products(unit: str, seconds: float) -> float:
    """
    Measure the products of one unit on all threads.

    Args:
        unit: "dot_s8s8" (bytes of weights and activations), "dot_u4s8" (the same with weights of four bits), "fma"
            (float32), "tile_s8" or "tile_bf16" (tile instructions), or "dot_bf16" (AVX-512 BF16).
        seconds: How long to repeat samples; the best one counts. 0 takes one sample, about ten milliseconds.

    Returns:
        Additions and multiplications per second; 0 where the instruction set has no such products.

    Raises:
        ValueError: The unit is unknown.
    """

def measure_barrier(seconds: float) -> float:
    """
    Measure the least time of a job in which all threads meet once, and which computes nothing.

    Args:
        seconds: How long to repeat samples; the best one counts. 0 takes one sample, less than ten milliseconds.

    Returns:
        Seconds of one job.
    """

class ReadBuffer:
    """
    A buffer that all threads read, to measure the bandwidth of memory.

    Args:
        num_bytes: The size; larger than the caches to measure memory.
    """

    def __init__(self, num_bytes: int) -> None: ...
    def measure(self, seconds: float) -> float:
        """Measure reads of the whole buffer on all threads: bytes per second."""

class StateStep:
    """
    The recurrent states that the sequences of one step read and write, copied.

    Args:
        query_start_loc: int32 [num_seqs + 1], ascending from 0: the rows of each sequence.
        sources: int32 [num_seqs], the slot of the state before the first token; -1 for zeros.
        slots: int32 [num_seqs], the slot of the state after the last token; -1 writes nothing.
        snapshots: int32 [num_snapshots, 3], (sequence, number of its tokens, slot): the state after so many tokens is written
            to the slot as well. Ascending by sequence and number.

    Raises:
        ValueError: The arrays do not fit together, or a slot that a sequence writes is read or written by another one.
    """

    def __init__(
        self,
        query_start_loc: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        sources: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        snapshots: Annotated[NDArray[numpy.int32], dict(shape=(None, 3), order="C", device="cpu", writable=False)],
    ) -> None: ...
    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""

class ShortConvolution:
    """
    c * convolution(b * x) of rows [b | c | x].

    Args:
        weight: float32 [width, channels] for the inputs from the oldest to the newest; a width of 2 to 7. Copied.
        bias: float32 [channels], copied.

    Raises:
        ValueError: The arrays do not fit together.
    """

    def __init__(
        self,
        weight: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None: ...
    def __call__(
        self,
        rows_ptr: int,
        row_stride: int,
        convolution_ptr: int,
        matrix_ptr: int,
        num_slots: int,
        step: StateStep,
        out_ptr: int,
        out_stride: int,
    ) -> None:
        """
        Compute the sequences of a step, and write their states.

        Args:
            rows_ptr: float32 [num_tokens, width], overwritten; there may be more rows than tokens of the step.
            row_stride, out_stride: The distance between rows, in floats.
            convolution_ptr: float32 [num_slots, width of the convolution - 1, channels], the last inputs of the convolution,
                the oldest first.
            matrix_ptr: float32 [num_slots, heads, key_size, value_size]; 0 for ShortConvolution.
            num_slots: The number of slots of the states.
            step: The sequences and their slots.
            out_ptr: float32 [num_tokens, outputs], overwritten, without overlap with rows.

        Raises:
            ValueError: The step has a slot that the states do not have.
        """

class MatrixRecurrence:
    """
    The gated delta rule or Mamba-2, with a state for each head.

        state = decay * state + k (x) change, y = q . state + skip * v

    The gated delta rule has rows [q | k | v | z | b | a] and decay = exp(rate * softplus(a + bias)). q and k are divided by
    the square root of their sum of squares plus 1e-6, and q by that of key_size. Then change = factor_scale * sigmoid(b) *
    (v - k . (decay * state)). With has_channel_decay each channel of k has its own decay, and rows are
    [a | z | q | k | v | b]. Mamba-2 has rows [z | v | k | q | dt], t = min(max(softplus(dt + bias), low), high),
    decay = exp(rate * t) and change = t * v. q, k and v pass through a convolution and SiLU first.

    Args:
        is_delta: Whether it is the gated delta rule.
        heads: The heads of v.
        key_heads: The heads of q and k, a divisor of heads.
        key_size, value_size: Values per head of k and v.
        has_tiled_keys: Whether head h reads q and k of head h % key_heads instead of h // (heads // key_heads).
        convolution_weight, convolution_bias: As for ShortConvolution.
        rate, bias: float32 [heads], or [heads * key_size] with has_channel_decay, copied.
        skip: float32 [heads], copied, or None.
        factor_scale: For the gated delta rule.
        low, high: For Mamba-2.
        norm_group: The number of values that are normed together.
        norm_weight: float32 [heads * value_size], or [norm_group] for all groups, copied; None for no norm.
        norm_eps: The constant that the norm adds to the mean square.
        gates_first: Whether the result is norm(y * gate(z)) instead of norm(y) * gate(z).
        row_scales: float32 [width], the factors of a row, copied; or None.
        has_channel_decay: Whether each channel of a key has its own decay, for the gated delta rule.
        has_sigmoid_gate: Whether gate is the sigmoid instead of SiLU.

    Raises:
        ValueError: The arrays and sizes do not fit together.
    """

    def __init__(
        self,
        *,
        is_delta: bool,
        heads: int,
        key_heads: int,
        key_size: int,
        value_size: int,
        has_tiled_keys: bool,
        convolution_weight: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        convolution_bias: Annotated[
            NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ]
        | None,
        rate: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        skip: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
        factor_scale: float,
        low: float,
        high: float,
        norm_group: int,
        norm_weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
        norm_eps: float,
        gates_first: bool,
        row_scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
        has_channel_decay: bool,
        has_sigmoid_gate: bool,
    ) -> None: ...
    def __call__(
        self,
        rows_ptr: int,
        row_stride: int,
        convolution_ptr: int,
        matrix_ptr: int,
        num_slots: int,
        step: StateStep,
        out_ptr: int,
        out_stride: int,
    ) -> None:
        """
        Compute the sequences of a step, and write their states.

        Args:
            rows_ptr: float32 [num_tokens, width], overwritten; there may be more rows than tokens of the step.
            row_stride, out_stride: The distance between rows, in floats.
            convolution_ptr: float32 [num_slots, width of the convolution - 1, channels], the last inputs of the convolution,
                the oldest first.
            matrix_ptr: float32 [num_slots, heads, key_size, value_size]; 0 for ShortConvolution.
            num_slots: The number of slots of the states.
            step: The sequences and their slots.
            out_ptr: float32 [num_tokens, outputs], overwritten, without overlap with rows.

        Raises:
            ValueError: The step has a slot that the states do not have.
        """

class Tape:
    """
    A recording of calls of layers, to be repeated in other steps.

    Everything that the recorded calls read or write must outlive the tape.
    """

    def __init__(self) -> None: ...
    def start(self, steps: Sequence[AttentionStep]) -> None:
        """
        Record the calls of this thread from now on, on this tape instead of any other.

        Args:
            steps: The steps that the recorded calls of attention use.
        """

    @staticmethod
    def stop() -> None:
        """Stop recording the calls of this thread."""

    def __len__(self) -> int:
        """Return the number of recorded calls."""

    def replay(self, steps: Sequence[AttentionStep], positions_ptr: int, states: StateStep | None = None) -> None:
        """
        Repeat the recorded calls in their order.

        Args:
            steps: The steps that take the places of the recorded ones.
            positions_ptr: int64 [num_tokens], the positions for rotary embedding.
            states: The recurrent states of the step; None if no recurrence was recorded.

        Raises:
            ValueError: The number of steps is not that of the recorded ones, or states is missing.
        """
