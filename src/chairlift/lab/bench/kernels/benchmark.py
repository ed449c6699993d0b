"""Every native kernel over the shapes of a model, beside what this CPU can do at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.kernels.choice import choose_kernels
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.formats import BYTES_PER_INPUT, common_format
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.lab.bench.kernels.ceilings import CeilingMeter, Ceilings, Work, median_of
from chairlift.lab.bench.kernels.instructions import InstructionCount, instruction_counts
from chairlift.lab.bench.kernels.passes import AttentionPass, LinearPass, SamplingPass, Seconds
from chairlift.lab.bench.load import at_least
from chairlift.lab.bench.machine import MachineFacts, host_facts, machine_facts, peak_rss_bytes
from chairlift.lab.bench.throughput import Spread
from chairlift.loading.resolve import close_gguf, load_config, matrix_formats, resolve_model
from chairlift.models.config import ModelConfig
from chairlift.models.declaration import MatrixSpec
from chairlift.server.batch.progress import progress_bar

CHUNK: Final = 512
"""Tokens that a prefill pass computes at once, at most: the default token budget."""

MIN_SECONDS: Final = 0.1
"""That passes are repeated for at least, where they are short."""

Case = dict[str, int | str]
"""What a kernel was given: its rows, or the sequences of a batch and their context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What is measured.

    Attributes:
        rows: of activations, for linear layers.
        formats: of weights; None: those of the model's file.
        batch_sizes: sequences that decode at once, and rows that are sampled from.
        contexts: tokens in KV memory, for attention.
        repeats: passes over everything; the median counts.
        ceiling_seconds: that each of the ceilings is measured for at the beginning; later a moment before each pass.

    Raises:
        ConfigError: naming the option, the value and the limit.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    formats: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (128, 1024, 4096)
    repeats: int = 7
    ceiling_seconds: float = 0.2

    def __post_init__(self) -> None:
        for name in ("rows", "batch_sizes", "contexts"):
            for value in getattr(self, name):
                at_least(name, value, 1)
        if not self.rows or self.formats == ():
            raise ConfigError("rows and formats must name at least one each")
        at_least("repeats", self.repeats, 1)
        for name in self.formats or ():
            if name not in BYTES_PER_INPUT:
                raise ConfigError(f"formats must be some of {', '.join(BYTES_PER_INPUT)}, got {name!r}")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel and what it took.

    Attributes:
        format: of the weights; empty where there are none.
        seconds: of all layers, for linear layers; of one layer, for attention.
        share: what the work would take at the ceilings, of what it took: the median over the passes, each compared
            with ceilings of the moment before it; None: nothing limits it.
        limit: "compute" or "memory", whichever ceiling that is.
    """

    kernel: str
    format: str
    case: Case
    seconds: Spread
    work: Work
    share: float | None
    limit: str | None

    @property
    def operations_per_s(self) -> float:
        return self.work.num_operations / self.seconds.median

    @property
    def bytes_per_s(self) -> float:
        return self.work.num_bytes / self.seconds.median

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "format": self.format,
            **self.case,
            "seconds": asdict(self.seconds),
            "operations_per_s": self.operations_per_s,
            "bytes_per_s": self.bytes_per_s,
            "share": self.share,
            "limit": self.limit,
        }


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What `run_kernels` measured, and on what.

    Attributes:
        ceilings: the best of all samples.
        usual_ceilings: their median.
    """

    machine: MachineFacts
    model: str
    kv_cache_dtype: str
    options: KernelOptions
    ceilings: Ceilings
    usual_ceilings: Ceilings
    linear: list[KernelTime]
    attention: list[KernelTime]
    sampling: list[KernelTime]
    instructions: list[InstructionCount]
    peak_rss_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds, operations and bytes a second."""
        return {
            "benchmark": "kernels",
            "machine": self.machine.to_dict(),
            "model": self.model,
            "kv_cache_dtype": self.kv_cache_dtype,
            "options": asdict(self.options),
            "ceilings": self.ceilings.to_dict(),
            "usual_ceilings": self.usual_ceilings.to_dict(),
            **{kind: [time.to_dict() for time in getattr(self, kind)] for kind in ("linear", "attention", "sampling")},
            "instructions": [asdict(count) for count in self.instructions],
            "peak_rss_bytes": self.peak_rss_bytes,
        }


def run_kernels(config: EngineConfig, options: KernelOptions) -> KernelResult:
    """Build the kernels with random weights of the model's shape, and measure them in turns.

    Args:
        config: its model, and the options that kernels feel.

    Raises:
        ConfigError: an option that cannot be honoured, or native kernels cannot be loaded.
        ModelLoadError: the model's configuration cannot be had.
    """
    native = load()
    native.set_num_threads(config.num_threads or host_facts().num_cores)
    torch.set_num_threads(1)
    files = resolve_model(config.model)
    model = load_config(files)
    _check_contexts(options, model)
    found = matrix_formats(None if config.random_weights else files, model)
    close_gguf()
    kv_cache_dtype = choose_kernels(replace(config, kernels="native"), model.dtype).kv_cache_dtype
    meter = CeilingMeter(native, options.ceiling_seconds)
    best = meter.measure()
    linear = _measure_in_turns(list(_linear_probes(native, model, found, options)), options.repeats, meter)
    probes = _attention_probes(model, config.block_size, kv_cache_dtype, options)
    attention = list(_measure_each(probes, options.repeats, meter))
    sampling = list(_measure_each(_sampling_probes(model, options), options.repeats, meter))
    samples = [sample for measured in (*linear, *attention, *sampling) for sample in measured.ceilings]
    times = [time for measured in linear for time in measured.times()]
    formats = options.formats or sorted({name for time in times for name in time.format.split(", ")})
    return KernelResult(
        machine=machine_facts(),
        model=files.name,
        kv_cache_dtype=kv_cache_dtype,
        options=options,
        ceilings=reduce(Ceilings.best_of, samples, best),
        usual_ceilings=median_of(samples),
        linear=times,
        attention=[time for measured in attention for time in measured.times()],
        sampling=[time for measured in sampling for time in measured.times()],
        instructions=[count for name in formats for count in instruction_counts(best.isa, name, options.rows)],
        peak_rss_bytes=peak_rss_bytes(),
    )


def _check_contexts(options: KernelOptions, model: ModelConfig) -> None:
    longest = max(options.contexts, default=1)
    if longest > model.max_position_embeddings:
        raise ConfigError(f"contexts must be at most {model.max_position_embeddings} for this model, got {longest}")


# -- what is measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """What a pass is given; `kernels`: their formats and their work."""

    kernels: dict[str, tuple[str, Work]]
    case: Case


@dataclass(frozen=True, slots=True)
class _Probe(_Case):
    """A pass, ready to be run."""

    run: Callable[[], Seconds]


@dataclass(frozen=True, slots=True)
class _Measured(_Case):
    """Seconds of the passes, by kernel, and the ceilings of the moment before each."""

    samples: dict[str, list[float]]
    ceilings: list[Ceilings]

    @classmethod
    def of(cls, probe: _Probe) -> _Measured:
        return cls(probe.kernels, probe.case, {kernel: [] for kernel in probe.kernels}, [])

    def add(self, ceilings: Ceilings, passes: Sequence[Seconds]) -> None:
        self.ceilings.append(ceilings)
        for kernel, samples in self.samples.items():
            samples.append(median(seconds[kernel] for seconds in passes))

    def times(self) -> list[KernelTime]:
        return [self._time(kernel, name, work) for kernel, (name, work) in self.kernels.items()]

    def _time(self, kernel: str, name: str, work: Work) -> KernelTime:
        samples = self.samples[kernel]
        least = [ceilings.least_seconds(work) for ceilings in self.ceilings]
        shares = [limit[0] / seconds for limit, seconds in zip(least, samples, strict=True) if limit]
        usual = median_of(self.ceilings).least_seconds(work)
        share, limit = (median(shares), usual[1]) if shares and usual else (None, None)
        return KernelTime(kernel, name, self.case, _spread(samples), work, share, limit)


def _spread(samples: list[float]) -> Spread:
    return Spread(median(samples), min(samples), max(samples))


def _linear_probes(
    native: NativeExtension, model: ModelConfig, found: Callable[[str], str], options: KernelOptions
) -> Iterator[_Probe]:
    """All formats are held at once, so that a machine that drifts is the same for all of them."""
    for name in options.formats or (None,):
        layers = LinearPass(native, model, partial(_format_of, found, name), max(options.rows))
        for rows in options.rows:
            kernels = {kernel: (layers.formats_of(kernel), layers.work(kernel, rows)) for kernel in layers.kernels}
            yield _Probe(kernels, {"rows": rows}, partial(layers, rows))


def _format_of(found: Callable[[str], str], name: str | None, matrix: MatrixSpec) -> str:
    return name or common_format([found(part) for part in matrix.weight_names])


def _attention_probes(
    model: ModelConfig, block_size: int, kv_cache_dtype: str, options: KernelOptions
) -> Iterator[_Probe]:
    kv_dtype = getattr(torch, kv_cache_dtype)
    for context in options.contexts:
        chunk = min(CHUNK, context)
        for num_seqs, num_queries in (*((size, 1) for size in options.batch_sizes), (1, chunk)):
            layers = AttentionPass(
                model,
                kv_dtype=kv_dtype,
                block_size=block_size,
                num_seqs=num_seqs,
                num_queries=num_queries,
                context=context,
            )
            case: Case = {"batch_size": num_seqs, "num_queries": num_queries, "context": context}
            yield _Probe({layers.kernel: ("", layers.work())}, case, layers)


def _sampling_probes(model: ModelConfig, options: KernelOptions) -> Iterator[_Probe]:
    for is_random in (False, True):
        for size in options.batch_sizes:
            rows = SamplingPass(model.vocab_size, size, is_random=is_random)
            yield _Probe({rows.kernel: ("", rows.work())}, {"rows": size}, rows)


# -- how -----------------------------------------------------------------------------------------------------------


def _measure_in_turns(probes: list[_Probe], repeats: int, meter: CeilingMeter) -> list[_Measured]:
    """`repeats` rounds over all probes, after one that is not measured."""
    measured = [_Measured.of(probe) for probe in probes]
    with progress_bar("linear layers", len(probes) * (repeats + 1)) as advance:
        for turn in range(repeats + 1):
            for probe, each in zip(probes, measured, strict=True):
                ceilings = meter.sample()
                seconds = probe.run()
                if turn:
                    each.add(ceilings, [seconds])
                advance()
    return measured


def _measure_each(probes: Iterator[_Probe], repeats: int, meter: CeilingMeter) -> Iterator[_Measured]:
    """One probe after the other, each made when its turn comes: `repeats` times some passes, after one that is not
    measured."""
    for probe in probes:
        measured = _Measured.of(probe)
        probe.run()
        for _ in range(repeats):
            ceilings = meter.sample()
            passes, end = [probe.run()], perf_counter() + MIN_SECONDS / repeats
            while perf_counter() < end:
                passes.append(probe.run())
            measured.add(ceilings, passes)
        yield measured
