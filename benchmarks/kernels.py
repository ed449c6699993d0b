"""Measures the native kernels of linear layers and attention in the shapes of a model, relative to the CPU's speed.

    python -m benchmarks.kernels [--model PATH] [--formats q4_1,int8] [--rows 1,4,16,64,256,512] [--batch-sizes 1,16,64]
                                 [--contexts 128,1024,4096] [--shared-keys 2048] [--kv-cache-dtype bfloat16]
                                 [--num-threads N] [--rounds 7]

A pass computes all layers of the model, so weights, K and V are read from memory as in a step, and not from a cache.
Values are normal random numbers; weights in formats to which floats cannot be rounded are random bytes with finite
scales. The ceiling of a pass is the time in which the CPU computes its operations or reads its bytes, whichever is
longer, at the speeds that are measured immediately before it, because the speed of a shared machine changes within
seconds.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import gguf
import torch
from benchmarks.attention_steps import AttentionCase, attention_metadata
from benchmarks.common import print_result
from benchmarks.products import Product, head_product, layer_products
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.engine.startup.threads import default_num_threads
from chairlift.engine.startup.weight_plan import MatrixFormats, file_parts
from chairlift.errors import ConfigError
from chairlift.kernels.activations import NATIVE_PROLOGUES, find_activation
from chairlift.kernels.attention import AttentionShape, KVCache, RotaryStep
from chairlift.kernels.choice import choose_kernels
from chairlift.kernels.cpu import load, native
from chairlift.kernels.cpu.attention import NativeAttention, NativeAttentionPlan
from chairlift.kernels.cpu.formats import ROUNDED, packed_parts
from chairlift.kernels.cpu.kernel_set import NativeMatrix, native_kernels
from chairlift.kernels.cpu.tape import MAX_ROWS, record_calls
from chairlift.kernels.interface import NO_PROLOGUE, NORM_KINDS, LinearKernel, Prologue
from chairlift.kernels.weight_formats import FLOAT_GROUP, FLOATS, ORDERED
from chairlift.loading.block_rows import BLOCK_LAYOUTS
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.matrix_spec import LM_HEAD, MatrixSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.layers import attention_shape
from chairlift.models.rotary import rotary_table

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

EIGHT_BIT: Final = ("q8_0", "iq4_nl", "iq4_xs", "u8_g32", "int8")
"""The formats whose products multiply bytes of eight bits; those of the others are below 128."""

CHUNK: Final = 512
"""Maximum number of tokens of a prefill pass: the default token budget."""

OWN_KEYS: Final = 16
"""Number of tokens of each sequence behind shared ones."""

MIN_SECONDS: Final = 0.1
"""Minimum time of all measured passes of a case, which are repeated if they are shorter."""

VALUES_AT_ONCE: Final = 1 << 20
"""Number of random weights that are drawn. A larger matrix repeats them."""

LARGEST_RANDOM_BYTE: Final = 0x3F
"""Largest byte of random blocks: two of them are a float16 between 0 and 2, wherever a block has its scales."""

KV_BYTES: Final = 256 << 20
"""Maximum size of K and V of an attention pass, unless one layer needs more."""

READ_BYTES: Final = 256 << 20
"""Size of the buffer that is read to measure memory: larger than the caches."""

UNITS: Final = {
    "dot_s8s8": "8-bit dot products, GOP/s",
    "dot_u4s8": "8-bit by 4-bit dot products, GOP/s",
    "fma": "float32 multiply-adds, GFLOP/s",
    "tile_s8": "8-bit products in tiles, GOP/s",
    "tile_bf16": "bfloat16 products in tiles, GFLOP/s",
    "dot_bf16": "bfloat16 dot products, GFLOP/s",
}
"""The operations of kernels. `dot_u4s8` multiplies weights of at most four bits, which takes fewer instructions without
VNNI. An instruction set without an operation has no speed for it."""

READ: Final = "read"
"""The speed of reading memory, in bytes per second."""

ISA_UNITS: Final = {"amx": {"int8": "tile_s8", "bf16": "tile_bf16"}, "avx512-bf16": {"bf16": "dot_bf16"}}
"""The operations of products that an instruction set has instructions for, by instruction set and format."""

XIELU: Final = (0.8, 0.8, 0.5, -1e-6)
"""Parameters of the activation xIELU, which do not change the time of a product."""

TILED_ROWS: Final = 64
"""Minimum number of rows for which tiles multiply weights with scales of 32 inputs."""

HALF_GROUPS: Final = ("q2_k", "q3_k", "q6_k")
"""The formats with scales of 16 inputs, which tiles do not multiply."""

LAYERS: Final = "layers"
"""Name of the linear layers of all decoder layers together."""

Seconds = dict[str, float]
"""The seconds of one pass by kernel."""

Speeds = Mapping[str, float]
"""Operations per second by unit, and READ."""


# -- work and ceilings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The minimum work of a kernel: the additions and multiplications by unit, and the bytes that are read."""

    operations: Mapping[str, float] = field(default_factory=dict)
    num_bytes: float = 0.0

    @property
    def num_operations(self) -> float:
        return sum(self.operations.values())

    def __add__(self, other: KernelWork) -> KernelWork:
        added = Counter(self.operations) + Counter(other.operations)
        return KernelWork(dict(added), self.num_bytes + other.num_bytes)

    def least_seconds(self, speeds: Speeds) -> tuple[float, str]:
        """The seconds of the work at these speeds, and the limit, "compute" or "memory"."""
        compute = sum(amount / speeds[unit] for unit, amount in self.operations.items())
        return max((compute, "compute"), (self.num_bytes / speeds[READ], "memory"))


class CeilingMeter:
    """Measures one sample of each maximum speed of the CPU in about ten milliseconds."""

    def __init__(self) -> None:
        self._buffer = native.ReadBuffer(READ_BYTES)

    def sample(self) -> Speeds:
        speeds = {unit: native.measure_products(unit, 0.0) for unit in UNITS}
        return {name: speed for name, speed in (speeds | {READ: self._buffer.measure(0.0)}).items() if speed}


def unit_of(weight_format: str, isa: str, rows: int) -> str:
    """The operation of products of this many rows with matrices in this format, one of UNITS."""
    if unit := ISA_UNITS.get(isa, {}).get(weight_format):
        return unit
    if weight_format in (*FLOATS, "f8_e4m3"):
        return "fma"
    if isa == "amx" and rows >= TILED_ROWS and weight_format not in HALF_GROUPS:
        return "tile_s8"
    return "dot_s8s8" if weight_format in EIGHT_BIT else "dot_u4s8"


# -- linear layers -------------------------------------------------------------------------------------------------


def native_parts(matrix: MatrixSpec, formats: MatrixFormats, quantization: str | None) -> list[tuple[str, int]]:
    """The (format, out_features) of the native matrices for a product of a model."""
    return packed_parts(file_parts(matrix, formats), None if matrix.keeps_format else quantization)


class LinearPass:
    """A pass over all linear layers of a model.

    Args:
        parts_of: returns (format, out_features) of the native matrices of a product.
        max_rows: maximum number of rows of activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        parts_of: Callable[[MatrixSpec], list[tuple[str, int]]],
        max_rows: int,
    ) -> None:
        self._kernels = native_kernels()
        self._generator = torch.Generator().manual_seed(0)
        self._drawn: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._residual = torch.zeros(max_rows, config.hidden_size)
        self._max_rows = max_rows
        self._calls: list[tuple[Product, LinearKernel]] = []
        self._tapes: dict[int, _native.Tape] = {}
        self._row_operations: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._weight_bytes: Counter[str] = Counter()
        products = [product for layer in config.layers for product in layer_products(layer)]
        for product in (*products, head_product(config)):
            self._add(product, parts_of(product.matrix))
        for product, kernel in self._calls:
            self._multiply(product, kernel, max_rows)  # buffers do not move afterwards, so a tape stays valid

    def _add(self, product: Product, parts: list[tuple[str, int]]) -> None:
        spec, width = product.matrix, input_width(product)
        matrices = tuple(self._make_matrix(weight_format, out, spec.in_features) for weight_format, out in parts)
        linear = self._kernels.make_linear(NativeMatrix(matrices, spec.kernel), None, _prologue(product))
        self._calls.append((product, linear))
        for matrix in matrices:
            for name in {spec.kernel, LM_HEAD if spec.kernel == LM_HEAD else LAYERS}:
                self._row_operations[name][matrix.format] += 2 * matrix.out_features * spec.in_features
                self._weight_bytes[name] += matrix.num_bytes
        if width not in self._inputs:
            self._inputs[width] = torch.randn((self._max_rows, width), generator=self._generator)

    def _make_matrix(self, weight_format: str, out_features: int, in_features: int) -> _native.PackedMatrix:
        matrix = native.PackedMatrix(weight_format.removesuffix(ORDERED), out_features, in_features)
        if weight_format.endswith(ORDERED):
            matrix.set_input_order(torch.randperm(in_features, generator=self._generator).tolist())
        values = self._weights(in_features) if weight_format in ROUNDED else self._blocks(matrix.format, in_features)
        pack = matrix.pack_floats if weight_format in ROUNDED else matrix.pack_blocks
        for first in range(0, out_features, len(values)):
            pack(first, values[: out_features - first].numpy())
        return matrix

    def _weights(self, in_features: int) -> torch.Tensor:
        if in_features not in self._drawn:
            size = (max(1, VALUES_AT_ONCE // in_features), in_features)
            self._drawn[in_features] = torch.randn(size, generator=self._generator) * 0.02
        return self._drawn[in_features]

    def _blocks(self, weight_format: str, in_features: int) -> torch.Tensor:
        """Random rows of a file, uint8 [rows, bytes of a row]."""
        if weight_format == "f8_e4m3":
            row_bytes = in_features - 4 * (in_features // -FLOAT_GROUP)
        elif weight_format in BLOCK_LAYOUTS:
            layout = BLOCK_LAYOUTS[weight_format]
            row_bytes = in_features // layout.inputs * layout.num_bytes
        else:
            inputs, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[weight_format.upper()]]
            row_bytes = in_features // inputs * num_bytes
        size = (max(1, VALUES_AT_ONCE // in_features), row_bytes)
        return torch.randint(LARGEST_RANDOM_BYTE + 1, size, generator=self._generator, dtype=torch.uint8)

    def __call__(self, rows: int) -> Seconds:
        """Measure the seconds of each kernel over all layers, and of LAYERS as a step runs them: in one call with up to
        MAX_ROWS rows."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for product, kernel in self._calls:
            start = perf_counter()
            self._multiply(product, kernel, rows)
            seconds[product.matrix.kernel] += perf_counter() - start
        layers = sum(seconds.values()) - seconds[LM_HEAD]
        return {LAYERS: self._time_tape(rows) if rows <= MAX_ROWS else layers, **seconds}

    def _multiply(self, product: Product, kernel: LinearKernel, rows: int) -> None:
        kernel(self._inputs[input_width(product)][:rows], self._residual[:rows] if product.adds_residual else None)

    def _time_tape(self, rows: int) -> float:
        if rows not in self._tapes:
            tape = native.Tape()
            with record_calls(tape):
                for product, kernel in self._calls:
                    if product.matrix.kernel != LM_HEAD:
                        self._multiply(product, kernel, rows)
            self._tapes[rows] = tape
        start = perf_counter()
        self._tapes[rows].replay([], 0)
        return perf_counter() - start

    @property
    def formats(self) -> dict[str, str]:
        """The formats of the matrices of each kernel."""
        return {name: ", ".join(sorted(found)) for name, found in self._row_operations.items()}

    def work(self, rows: int) -> dict[str, KernelWork]:
        """The work of each kernel in one pass, which reads every weight once."""
        work = {}
        for name, row_operations in self._row_operations.items():
            operations: Counter[str] = Counter()
            for weight_format, amount in row_operations.items():
                operations[unit_of(weight_format, native.isa(), rows)] += rows * amount
            work[name] = KernelWork(operations, self._weight_bytes[name])
        return work


def native_prologue(product: Product) -> str:
    """The norm or activation that the native kernel fuses with the product. "none" if torch computes it: then only the
    product is measured."""
    return product.prologue if product.prologue in NATIVE_PROLOGUES else "none"


def input_width(product: Product) -> int:
    """The number of values in a row before the prologue."""
    kind = native_prologue(product)
    is_gated = kind not in ("none", *NORM_KINDS) and find_activation(kind)[1]
    return product.matrix.in_features * (2 if is_gated else 1)


def _prologue(product: Product) -> Prologue:
    kind, size = native_prologue(product), product.matrix.in_features
    if kind == "none":
        return NO_PROLOGUE
    if kind not in NORM_KINDS:
        return Prologue(kind, parameters=XIELU if kind == "xielu" else ())
    return Prologue(kind, torch.ones(size), torch.zeros(size) if kind == "layer_norm" else None, 1e-5)


# -- attention -----------------------------------------------------------------------------------------------------


class AttentionPass:
    """A pass over norm, rotation, KV writes and attention of all layers, with blocks in random order.

    Args:
        shares_keys: whether keys that sequences share are computed once.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: torch.dtype,
        block_size: int,
        case: AttentionCase,
        *,
        shares_keys: bool = True,
    ) -> None:
        self.kernel = ("decode" if case.num_queries == 1 else "prefill") + ("" if shares_keys else " for each")
        self._case, self._kv_dtype = case, kv_dtype
        specs = config.attention_specs
        blocks = case.num_seqs * -(-case.context // block_size)
        layer_bytes = blocks * block_size * max(_token_bytes(spec, kv_dtype) for spec in specs.values())
        self._specs = list(specs.values())[: max(1, KV_BYTES // layer_bytes)]
        generator = torch.Generator().manual_seed(0)
        metadata = attention_metadata(case, block_size)
        positions = torch.arange(case.context - case.num_queries, case.context).repeat(case.num_seqs)
        backends: dict[AttentionShape, tuple[NativeAttention, NativeAttentionPlan]] = {}
        inputs: dict[int, torch.Tensor] = {}
        caches: list[KVCache] = []
        cpu = torch.device("cpu")
        rotations = {key: RotaryStep(positions, rotary_table(*key, case.context, cpu)) for key in config.ropes}
        self._calls: list[Callable[[], torch.Tensor]] = []
        native.set_shares_keys(shares_keys)
        for spec in self._specs:
            shape = attention_shape(spec, torch.float32, cpu, kv_dtype)
            if shape not in backends:
                backend = NativeAttention(shape)
                backends[shape] = backend, backend.plan(metadata)
            backend, plan = backends[shape]
            width, source = spec.row_size, spec.kv_source
            if width not in inputs:
                inputs[width] = torch.randn((len(positions), width), generator=generator)
            rotation = None if spec.rope is None else rotations[spec.rope, spec.head_dim]
            caches.append(_filled_cache(backend, blocks, block_size, generator) if source is None else caches[source])
            call = partial(backend.forward, inputs[width], rotation, caches[-1], plan, spec.sliding_window, None)
            self._calls.append(call)
        native.set_shares_keys(True)

    def __call__(self) -> Seconds:
        """Measure the seconds of a layer."""
        start = perf_counter()
        for call in self._calls:
            call()
        return {self.kernel: (perf_counter() - start) / len(self._calls)}

    def work(self, isa: str) -> KernelWork:
        """The mean work of a layer on an instruction set: reading every visible key and value once, and two products
        of a query with each."""
        unit = "fma" if self._kv_dtype == torch.float32 else ISA_UNITS.get(isa, {}).get("bf16", "fma")
        num_seqs, num_queries, context, _ = self._case
        products = read = 0
        for spec in self._specs:
            window = spec.sliding_window or context
            num_pairs = sum(min(position + 1, window) for position in range(context - num_queries, context))
            products += 4 * spec.query_size * num_pairs
            read += min(context, window + num_queries - 1) * _token_bytes(spec, self._kv_dtype)
        scale = num_seqs / len(self._specs)
        return KernelWork({unit: products * scale}, read * scale)


def _token_bytes(spec: AttentionSpec, kv_dtype: torch.dtype) -> int:
    """The bytes of K and V of one token in one layer, including scales."""
    scale = 4 if kv_dtype == torch.int8 else 0
    return spec.num_kept_memories * spec.num_kv_heads * (spec.head_dim * kv_dtype.itemsize + scale)


def _filled_cache(backend: NativeAttention, num_blocks: int, block_size: int, generator: torch.Generator) -> KVCache:
    cache = backend.allocate(num_blocks, block_size)
    for kept in cache:
        if kept is not None:
            kept.copy_(torch.randn(kept.shape[1:], generator=generator) * (40 if kept.dtype == torch.int8 else 1))
    return cache


# -- measurements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measurement:
    """The rounds of one pass.

    Attributes:
        case: the size of the pass.
        run: runs the pass.
        work: the work of each kernel of the pass.
        formats: the formats of the weights of each kernel, if it has weights.
        samples: the speeds of the CPU and the seconds of each kernel, one entry for each round.
    """

    case: Mapping[str, int]
    run: Callable[[], Seconds]
    work: Mapping[str, KernelWork]
    formats: Mapping[str, str] = field(default_factory=dict)
    samples: list[tuple[Speeds, Seconds]] = field(default_factory=list)

    def records(self) -> list[dict[str, Any]]:
        """One record for each kernel. `ceiling_share` is the median over the rounds of the time at the ceilings divided
        by the measured time."""
        return [self._record(kernel, work) for kernel, work in self.work.items()]

    def _record(self, kernel: str, work: KernelWork) -> dict[str, Any]:
        seconds = [measured[kernel] for _, measured in self.samples]
        least = [work.least_seconds(speeds) for speeds, _ in self.samples]
        return {
            "kernel": kernel,
            "format": self.formats.get(kernel, ""),
            **self.case,
            "seconds": seconds,
            "operations_per_s": work.num_operations / median(seconds),
            "bytes_per_s": work.num_bytes / median(seconds),
            "ceiling_share": median(limit / own for (limit, _), own in zip(least, seconds, strict=True)),
            "limited_by": sorted(least)[len(least) // 2][1],
        }


def measure(measurements: Sequence[Measurement], rounds: int, meter: CeilingMeter) -> None:
    """Run all passes in turn in each round, after an unmeasured one. The median of a repeated short pass counts."""
    for number in range(rounds + 1):
        for each in measurements:
            speeds, end = meter.sample(), perf_counter() + MIN_SECONDS / rounds
            passes = [each.run()]
            while number and perf_counter() < end:
                passes.append(each.run())
            if number:
                each.samples.append((speeds, {name: median(one[name] for one in passes) for name in each.work}))


def linear_measurements(
    model: ModelConfig, found: MatrixFormats, formats: Sequence[str | None], rows: list[int]
) -> Iterator[Measurement]:
    """The passes of all formats, so that changes of the machine's speed affect all of them alike."""
    for name in formats:
        layers = LinearPass(model, partial(native_parts, formats=found, quantization=name), max(rows))
        for count in rows:
            yield Measurement({"rows": count}, partial(layers, count), layers.work(count), layers.formats)


def attention_cases(
    batch_sizes: Sequence[int], contexts: Sequence[int], shared: Sequence[int]
) -> Iterator[AttentionCase]:
    """For each context a decode step of each batch size, and one chunk of a prompt; for each number of shared keys a
    decode step of each batch size of several sequences with `OWN_KEYS` more."""
    for context in contexts:
        yield from (AttentionCase(size, 1, context) for size in batch_sizes)
        yield AttentionCase(1, min(CHUNK, context), context)
    for num_shared in shared:
        yield from (AttentionCase(size, 1, num_shared + OWN_KEYS, num_shared) for size in batch_sizes if size > 1)


def measure_kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the kernels with random weights in the shapes of the model.

    Raises:
        ConfigError: the model has experts, or its context is shorter than one of `contexts`.
    """
    load()
    native.set_num_threads(args.num_threads or default_num_threads())
    torch.set_num_threads(1)
    source = resolve_model(args.model)
    model = source.config()
    if any(layer.mixture is not None for layer in model.layers):
        raise ConfigError(f"{model.name} is a mixture of experts, whose products depend on the tokens of a step")
    longest = max(args.contexts + [count + OWN_KEYS for count in args.shared_keys])
    if longest > model.max_position_embeddings:
        raise ConfigError(f"contexts must be at most {model.max_position_embeddings} for this model, got {longest}")
    found, name = source.formats(model), source.name
    del source  # It holds the open file.
    config = EngineConfig(model=args.model, kernels="native", kv_cache_dtype=args.kv_cache_dtype)
    kv_cache_dtype = choose_kernels(config, model.dtype).kv_cache_dtype
    meter = CeilingMeter()
    linear = list(linear_measurements(model, found, args.formats or [None], args.rows))
    measure(linear, args.rounds, meter)
    samples = [speeds for each in linear for speeds, _ in each.samples]
    attention: list[dict[str, Any]] = []
    # One case after the other: K and V are large.
    for case in attention_cases(args.batch_sizes, args.contexts, args.shared_keys):
        make_pass = partial(AttentionPass, model, getattr(torch, kv_cache_dtype), config.block_size, case)
        passes = [make_pass(shares_keys=shares) for shares in ((False, True) if case.num_shared else (True,))]
        measured = [Measurement(case._asdict(), each, {each.kernel: each.work(native.isa())}) for each in passes]
        measure(measured, args.rounds, meter)
        attention += [record for each in measured for record in each.records()]
        samples += [speeds for each in measured for speeds, _ in each.samples]
    return {
        "model": name,
        "isa": native.isa(),
        "kv_cache_dtype": kv_cache_dtype,
        "ceilings": {
            name: {"best": max(values), "median": median(values)}
            for name in samples[0]
            for values in [[speeds[name] for speeds in samples]]
        },
        "linear": [record for each in linear for record in each.records()],
        "attention": attention,
    }


# -- the command ---------------------------------------------------------------------------------------------------


def ceilings_table(result: Mapping[str, Any]) -> Table:
    """The maximum speeds, over all samples."""
    table = Table("", "best", "median", title=f"ceilings: {result['isa']}")
    for name, values in result["ceilings"].items():
        table.add_row(UNITS.get(name, "reading memory, GB/s"), *(f"{value / 1e9:.3g}" for value in values.values()))
    return table


def kernels_table(title: str, records: Sequence[Mapping[str, Any]], sizes: Sequence[str]) -> Table:
    """The time of each kernel, its speed, and its share of the ceiling."""
    columns = ("µs", "GOP/s", "GB/s", "% of ceiling", "limited by")
    table = Table(*sizes, "kernel", "format", *columns, title=title)
    for record in records:
        seconds, speeds = median(record["seconds"]), (record["operations_per_s"], record["bytes_per_s"])
        cells = (f"{seconds * 1e6:,.0f}", *(f"{speed / 1e9:.3g}" for speed in speeds))
        share = f"{100 * record['ceiling_share']:.0f}"
        names = (str(record[name]) for name in (*sizes, "kernel", "format"))
        table.add_row(*names, *cells, share, record["limited_by"])
    return table


def numbers(text: str) -> list[int]:
    """Integers of at least 1, separated by commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--formats", type=lambda text: text.split(","), help="default: those of the file")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 64, 256, 512], help="rows of linear layers")
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 16, 64], help="sequences that decode together")
    parser.add_argument("--contexts", type=numbers, default=[128, 1024, 4096], help="tokens in KV memory")
    parser.add_argument("--shared-keys", type=numbers, default=[], help="tokens that sequences share")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-threads", type=int, help="default: all cores")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args(arguments)
    result = measure_kernels(args)
    name = result["model"]
    tables = [
        ceilings_table(result),
        kernels_table(f"{name}: all linear layers", result["linear"], ["rows"]),
        kernels_table(
            f"{name}: attention of one layer, K and V in {result['kv_cache_dtype']}",
            result["attention"],
            AttentionCase._fields,
        ),
    ]
    print_result("kernels", vars(args), result, tables, as_json=args.json)


if __name__ == "__main__":
    main()
