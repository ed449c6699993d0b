"""`chairlift bench kernels`: the speed of the native kernels in the shapes of a model, relative to the CPU's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from chairlift.config import EngineConfig
from chairlift.engine.progress import progress_bar
from chairlift.engine.startup.memory_plan import MatrixFormats, file_parts
from chairlift.engine.startup.threads import default_num_threads
from chairlift.errors import ConfigError
from chairlift.kernels.choice import choose_kernels
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.formats import packed_parts
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.lab.bench.bench_options import KernelOptions
from chairlift.lab.bench.benchmark_result import MeasuredRange
from chairlift.lab.bench.kernels.ceilings import CeilingMeter, Ceilings, KernelWork, combine_ceilings
from chairlift.lab.bench.kernels.passes import AttentionPass, LinearPass, RecurrencePass, SamplingPass, Seconds
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.loading.resolve import close_gguf, load_config, matrix_formats, resolve_model
from chairlift.models.declaration import MatrixSpec, ModelConfig

CHUNK: Final = 512
"""Maximum number of tokens of a prefill pass: the default token budget."""

MIN_SECONDS: Final = 0.1
"""Minimum time of each measurement of a short pass, in which it is repeated."""

KINDS: Final = ("linear", "attention", "recurrence", "sampling")
"""The fields of a result that are times of kernels."""

KernelCase = dict[str, int | str]
"""The size of a measurement: the rows, or the sequences of a batch and their context."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of a kernel.

    Attributes:
        format: format of the weights; empty for kernels without weights.
        seconds: time of all layers for linear layers, and of one layer for attention and recurrences.
        ceiling_share: the time that the work takes at the ceilings, divided by the measured time. It is the median over
            the passes, each relative to the ceilings sampled before it; None if no ceiling applies.
        limited_by: the ceiling that applies, "compute" or "memory".
    """

    kernel: str
    format: str
    case: KernelCase
    seconds: MeasuredRange
    work: KernelWork
    ceiling_share: float | None
    limited_by: str | None

    @property
    def operations_per_s(self) -> float:
        return self.work.num_operations / self.seconds.median

    @property
    def bytes_per_s(self) -> float:
        return self.work.num_bytes / self.seconds.median

    def to_dict(self) -> dict[str, Any]:
        """The time for JSON."""
        names = ("operations_per_s", "bytes_per_s", "ceiling_share", "limited_by")
        values = {name: getattr(self, name) for name in names}
        return {"kernel": self.kernel, "format": self.format, **self.case, "seconds": asdict(self.seconds), **values}


@dataclass(frozen=True, slots=True)
class KernelResult:
    """The times of all kernels, with the machine and the ceilings that they are relative to.

    Attributes:
        ceilings: the best of all samples.
        median_ceilings: the median of the samples.
    """

    machine: MachineFacts
    model: str
    kv_cache_dtype: str
    options: KernelOptions
    ceilings: Ceilings
    median_ceilings: Ceilings
    linear: list[KernelTime]
    attention: list[KernelTime]
    recurrence: list[KernelTime]
    sampling: list[KernelTime]
    peak_rss_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in seconds, operations per second and bytes per second."""
        return {
            "benchmark": "kernels",
            "machine": self.machine.to_dict(),
            "model": self.model,
            "kv_cache_dtype": self.kv_cache_dtype,
            "options": asdict(self.options),
            "ceilings": self.ceilings.to_dict(),
            "median_ceilings": self.median_ceilings.to_dict(),
            **{kind: [time.to_dict() for time in getattr(self, kind)] for kind in KINDS},
            "peak_rss_bytes": self.peak_rss_bytes,
        }


def run_kernels(config: EngineConfig, options: KernelOptions) -> KernelResult:
    """Measure the kernels with random weights in the shapes of the model.

    Args:
        config: the model, and the options that affect kernels.

    Raises:
        ConfigError: an option cannot be honoured, the native kernels cannot be loaded, or the model has experts.
        ModelLoadError: the configuration of the model cannot be loaded.
    """
    native = load()
    native.set_num_threads(config.num_threads or default_num_threads())
    torch.set_num_threads(1)
    files = resolve_model(config.model)
    model = load_config(files)
    if any(layer.mixture is not None for layer in model.layers):
        raise ConfigError(
            f"{model.name} is a mixture of experts, whose products depend on the tokens of a step, so bench kernels "
            "does not measure it: use bench latency or bench throughput"
        )
    longest = max(options.contexts, default=1)
    if longest > model.max_position_embeddings:
        raise ConfigError(f"contexts must be at most {model.max_position_embeddings} for this model, got {longest}")
    found = matrix_formats(None if config.load_format == "dummy" else files, model)
    close_gguf()
    kv_cache_dtype = choose_kernels(replace(config, kernels="native"), model.dtype).kv_cache_dtype
    meter = CeilingMeter(native, options.ceiling_seconds)
    best = meter.measure()
    linear = _measure_interleaved(list(_linear_measurements(native, model, found, options)), options.repeats, meter)
    passes = _attention_measurements(model, config.block_size, kv_cache_dtype, options, best.isa)
    attention = list(_measure_each(passes, options.repeats, meter))
    recurrence = list(_measure_each(_recurrence_measurements(model, options), options.repeats, meter))
    sampling = list(_measure_each(_sampling_measurements(model, options), options.repeats, meter))
    samples = [sample for each in (*linear, *attention, *recurrence, *sampling) for sample in each.ceilings]
    measured = zip(KINDS, (linear, attention, recurrence, sampling), strict=True)
    return KernelResult(
        machine=machine_facts(),
        model=files.name,
        kv_cache_dtype=kv_cache_dtype,
        options=options,
        ceilings=combine_ceilings([best, *samples], max),
        median_ceilings=combine_ceilings(samples, median),
        **{kind: [time for each in passes for time in each.times()] for kind, passes in measured},
        peak_rss_bytes=peak_rss_bytes(),
    )


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The repeated measurement of one pass.

    Attributes:
        kernels: format and work of each kernel of the pass.
        case: the size of the pass.
        run: runs the pass.
        samples: seconds of each kernel, one value for each repeat.
        ceilings: the ceilings sampled before each repeat.
    """

    kernels: dict[str, tuple[str, KernelWork]]
    case: KernelCase
    run: Callable[[], Seconds]
    samples: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ceilings: list[Ceilings] = field(default_factory=list)

    def add(self, ceilings: Ceilings, passes: Sequence[Seconds]) -> None:
        self.ceilings.append(ceilings)
        for kernel in self.kernels:
            self.samples[kernel].append(median(seconds[kernel] for seconds in passes))

    def times(self) -> list[KernelTime]:
        return [self._time(kernel, name, work) for kernel, (name, work) in self.kernels.items()]

    def _time(self, kernel: str, name: str, work: KernelWork) -> KernelTime:
        samples = self.samples[kernel]
        least = [ceilings.least_seconds(work) for ceilings in self.ceilings]
        shares = [limit[0] / seconds for limit, seconds in zip(least, samples, strict=True) if limit]
        usual = combine_ceilings(self.ceilings, median).least_seconds(work)
        share, limit = (median(shares), usual[1]) if shares and usual else (None, None)
        spread = MeasuredRange(median(samples), min(samples), max(samples))
        return KernelTime(kernel, name, self.case, spread, work, share, limit)


def _linear_measurements(
    native: NativeExtension, model: ModelConfig, found: MatrixFormats, options: KernelOptions
) -> Iterator[_Measurement]:
    """Create the weights in all formats together, so that changes of the machine's speed affect all formats alike."""
    for name in options.formats or (None,):
        parts_of = partial(native_parts, formats=found, quantization=name)
        layers = LinearPass(native, model, parts_of, max(options.rows))
        for rows in options.rows:
            kernels = {kernel: (layers.formats_of(kernel), layers.work(kernel, rows)) for kernel in layers.kernels}
            yield _Measurement(kernels, {"rows": rows}, partial(layers, rows))


def native_parts(matrix: MatrixSpec, formats: MatrixFormats, quantization: str | None) -> list[tuple[str, int]]:
    """The (format, out_features) of the native matrices for a product of a model."""
    return packed_parts(file_parts(matrix, formats), None if matrix.keeps_format else quantization)


def _attention_measurements(
    model: ModelConfig, block_size: int, kv_cache_dtype: str, options: KernelOptions, isa: str
) -> Iterator[_Measurement]:
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
            case: KernelCase = {"batch_size": num_seqs, "num_queries": num_queries, "context": context}
            yield _Measurement({layers.kernel: ("", layers.work(isa))}, case, layers)


def _recurrence_measurements(model: ModelConfig, options: KernelOptions) -> Iterator[_Measurement]:
    if not model.state_values_per_sequence:
        return
    chunk = min(CHUNK, max(options.contexts, default=0))
    for num_seqs, num_queries in (*((size, 1) for size in options.batch_sizes), *([(1, chunk)] if chunk > 1 else [])):
        layers = RecurrencePass(model, num_seqs=num_seqs, num_queries=num_queries)
        case: KernelCase = {"batch_size": num_seqs, "num_queries": num_queries}
        yield _Measurement({layers.kernel: ("", layers.work())}, case, layers)


def _sampling_measurements(model: ModelConfig, options: KernelOptions) -> Iterator[_Measurement]:
    for is_random in (False, True):
        for size in options.batch_sizes:
            rows = SamplingPass(model.vocab_size, size, is_random=is_random)
            yield _Measurement({rows.kernel: ("", rows.work())}, {"rows": size}, rows)


def _measure_interleaved(measurements: list[_Measurement], repeats: int, meter: CeilingMeter) -> list[_Measurement]:
    """Run `repeats` rounds over all passes after an unmeasured one."""
    with progress_bar("linear layers", len(measurements) * (repeats + 1)) as advance:
        for number in range(repeats + 1):
            for measurement in measurements:
                ceilings = meter.sample()
                seconds = measurement.run()
                if number:
                    measurement.add(ceilings, [seconds])
                advance()
    return measurements


def _measure_each(measurements: Iterator[_Measurement], repeats: int, meter: CeilingMeter) -> Iterator[_Measurement]:
    """Measure one pass after the other, so that only one is in memory."""
    for measurement in measurements:
        measurement.run()
        for _ in range(repeats):
            ceilings = meter.sample()
            passes, end = [measurement.run()], perf_counter() + MIN_SECONDS / repeats
            while perf_counter() < end:
                passes.append(measurement.run())
            measurement.add(ceilings, passes)
        yield measurement
