"""Every native kernel over the shapes of a model, beside what this CPU can do at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from chairlift.bench.ceilings import Ceilings, CeilingSampler, Work
from chairlift.bench.instructions import InstructionCount, instruction_counts
from chairlift.bench.kernel_passes import AttentionPass, LinearPass, SamplingPass, Seconds
from chairlift.bench.linear_layers import LinearLayer
from chairlift.bench.load import at_least
from chairlift.bench.machine import MachineFacts, host_facts, machine_facts, peak_rss_bytes
from chairlift.bench.progress import progress_bar
from chairlift.bench.throughput import Spread
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.kernels.choice import choose_kernels
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.formats import BYTES_PER_INPUT, common_format
from chairlift.loading.formats import matrix_formats
from chairlift.loading.resolve import close_files, load_config, resolve_model
from chairlift.models.config import ModelConfig

CHUNK: Final = 512
"""Tokens that a prefill pass computes at once, at most: the default token budget."""

MIN_SECONDS: Final = 0.05
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
        repeats: passes over everything.
        ceiling_seconds: that each of the ceilings is measured for at the beginning; a tenth after each round.

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
        least_seconds: what the work would take at the ceilings, and which of them limits it, "compute" or "memory";
            None: none of them does.

    Rates are of the fastest pass, since the ceilings are the best of their samples too (as in McCalpin's STREAM): both
    are what the machine can do, and its other users stand in neither.
    """

    kernel: str
    format: str
    case: Case
    seconds: Spread
    work: Work
    least_seconds: tuple[float, str] | None

    @property
    def operations_per_s(self) -> float:
        return self.work.num_operations / self.seconds.min

    @property
    def bytes_per_s(self) -> float:
        return self.work.num_bytes / self.seconds.min

    @property
    def share(self) -> float | None:
        """Of the ceiling."""
        return self.least_seconds and self.least_seconds[0] / self.seconds.min

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "format": self.format,
            **self.case,
            "seconds": asdict(self.seconds),
            "operations_per_s": self.operations_per_s,
            "bytes_per_s": self.bytes_per_s,
            "share": self.share,
            "limit": self.least_seconds and self.least_seconds[1],
        }


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What `run_kernels` measured, and on what."""

    machine: MachineFacts
    model: str
    kv_cache_dtype: str
    options: KernelOptions
    ceilings: Ceilings
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
    close_files()
    kv_cache_dtype = choose_kernels(replace(config, attention_backend="native"), model.dtype).kv_cache_dtype
    sampler = CeilingSampler(native, options.ceiling_seconds)
    linear = _measure_in_turns(list(_linear_probes(native, model, found, options)), options.repeats, sampler.sample)
    probes = _attention_probes(model, config.block_size, kv_cache_dtype, options)
    attention = list(_measure_each(probes, options.repeats, sampler.sample))
    sampling = list(_measure_each(_sampling_probes(model, options), options.repeats, sampler.sample))
    ceilings = sampler.best
    times = [time for measured in linear for time in measured.times(ceilings)]
    formats = options.formats or sorted({name for time in times for name in time.format.split(", ")})
    return KernelResult(
        machine=machine_facts(),
        model=files.name,
        kv_cache_dtype=kv_cache_dtype,
        options=options,
        ceilings=ceilings,
        linear=times,
        attention=[time for measured in attention for time in measured.times(ceilings)],
        sampling=[time for measured in sampling for time in measured.times(ceilings)],
        instructions=[count for name in formats for count in instruction_counts(ceilings.isa, name, options.rows)],
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
    """Seconds of the passes, by kernel."""

    samples: dict[str, list[float]]

    @classmethod
    def of(cls, probe: _Probe) -> _Measured:
        return cls(probe.kernels, probe.case, {kernel: [] for kernel in probe.kernels})

    def add(self, seconds: Seconds) -> None:
        for kernel, samples in self.samples.items():
            samples.append(seconds[kernel])

    def times(self, ceilings: Ceilings) -> list[KernelTime]:
        return [
            KernelTime(kernel, name, self.case, _spread(self.samples[kernel]), work, ceilings.least_seconds(work))
            for kernel, (name, work) in self.kernels.items()
        ]


def _spread(samples: list[float]) -> Spread:
    return Spread(median(samples), min(samples), max(samples))


def _linear_probes(
    native: Any, model: ModelConfig, found: Callable[[str], str], options: KernelOptions
) -> Iterator[_Probe]:
    """All formats are held at once, so that a machine that drifts is the same for all of them."""
    for name in options.formats or (None,):
        layers = LinearPass(native, model, partial(_format_of, found, name), max(options.rows))
        for rows in options.rows:
            kernels = {kernel: (layers.formats_of(kernel), layers.work(kernel, rows)) for kernel in layers.kernels}
            yield _Probe(kernels, {"rows": rows}, partial(layers, rows))


def _format_of(found: Callable[[str], str], name: str | None, layer: LinearLayer) -> str:
    return name or common_format([found(part) for part in layer.parts])


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


def _measure_in_turns(probes: list[_Probe], repeats: int, after_each: Callable[[], None]) -> list[_Measured]:
    """`repeats` rounds over all probes, after one that is not measured; `after_each`: of the rounds."""
    measured = [_Measured.of(probe) for probe in probes]
    with progress_bar("linear layers", len(probes) * (repeats + 1)) as advance:
        for turn in range(repeats + 1):
            for probe, each in zip(probes, measured, strict=True):
                seconds = probe.run()
                if turn:
                    each.add(seconds)
                advance()
            after_each()
    return measured


def _measure_each(probes: Iterator[_Probe], repeats: int, after_each: Callable[[], None]) -> Iterator[_Measured]:
    """One probe after the other, each made when its turn comes: `repeats` passes or more, after one that is not
    measured; `after_each`: of the probes."""
    for probe in probes:
        measured = _Measured.of(probe)
        probe.run()
        end, count = perf_counter() + MIN_SECONDS, 0
        while count < repeats or perf_counter() < end:
            measured.add(probe.run())
            count += 1
        after_each()
        yield measured
