"""A load on an engine that is simulated: `chairlift simulate` without a preset."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.core.baselines.selection import max_request_slots
from chairlift.engine.startup.model_shape import ModelShape
from chairlift.engine.startup.startup_plan import plan_pool, resolve_max_model_len
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.events import EngineStarted, Event, EventBroadcaster, EventSink, open_event_log, read_events
from chairlift.lab.bench.load import LoadOptions
from chairlift.lab.bench.serving.tenants import TenantFigures, TenantTally, parse_shares, tenant_table, with_tenants
from chairlift.lab.bench.text import json_line, load_arrivals, load_lengths, number
from chairlift.lab.metrics.reported_metrics import REPORTED_METRICS
from chairlift.lab.metrics.run import RunMetrics, RunTally
from chairlift.lab.planning.planner import PlannedModel, plan_memory
from chairlift.lab.presets.printing import print_constants
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.devices import DEVICES, Device, find_device
from chairlift.lab.sim.fitted_cost_model import fit_cost_model
from chairlift.lab.sim.published_models import MODEL_SHAPES
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig, SimResult, simulate
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.loading.resolve import matrix_formats
from chairlift.worker.kv_cache_plan import FREE_MEMORY_SHARE

DEFAULT_MODEL = "opt-13b"
DEFAULT_DEVICE = "A100-40GB"
DTYPE_OF_BYTES = {1: "float16", 2: "float16", 4: "float32"}
"""What the planner computes in, by the size of a device's values; it knows nothing below half precision."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What takes the place of a model on a device.

    Attributes:
        device: a name of `sim.devices`, or a file that a calibration wrote.
        tensor_parallel_size: devices that share the model.
        fitted_to: an event log; steps then take what its steps took, and the device says only how large the pool is.
        tenants: shares of the requests, as "name=share,name=share"; all are of one tenant if None.

    Raises:
        ConfigError: both of tensor_parallel_size and fitted_to are given, or `tenants` is not of that form.
    """

    device: str = DEFAULT_DEVICE
    tensor_parallel_size: int = 1
    fitted_to: Path | None = None
    tenants: str | None = None

    def __post_init__(self) -> None:
        if self.tenants is not None:
            parse_shares(self.tenants)
        if self.fitted_to is not None and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} enters the roofline, and with fitted_to steps take "
                f"what was recorded: leave one of them out"
            )


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What was simulated, with which constants, and what came out."""

    engine: EngineStarted
    load: LoadOptions
    constants: list[tuple[str, str]]
    run: RunMetrics
    result: SimResult
    tenants: dict[str, TenantFigures]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds and shares, whatever the units of the table."""
        return {
            "benchmark": "simulate",
            "engine": asdict(self.engine),
            "workload": asdict(self.load),
            "constants": dict(self.constants),
            "results": self.run.to_dict(),
            "tenants": {name: figures.to_dict() for name, figures in self.tenants.items()},
            "num_steps": self.result.num_steps,
            "simulated_seconds": self.result.seconds,
            "wall_seconds": self.result.wall_seconds,
            "steps_per_wall_second": self.result.steps_per_wall_second,
            "rejected": self.result.rejected,
        }


def run_simulation(config: EngineConfig, load: LoadOptions, options: SimulationOptions) -> SimulationResult:
    """Simulate the load on the engine that `config` describes.

    Raises:
        ConfigError: an option that cannot be honoured, with the arithmetic; a file that is not what it should be.
        ModelLoadError: the model's configuration cannot be had.
    """
    device = find_device(options.device)
    model = find_model(config.model, device)
    log = None if options.fitted_to is None else _read_log(options.fitted_to)
    cost_model = _cost_model(model, device, options, log)
    recorded = next((event for event in log or () if isinstance(event, EngineStarted)), None)
    if recorded is not None and config.model is None:
        sim = like_recorded(config, recorded)
    else:
        sim = sim_config(config, model, device, options.tensor_parallel_size)
    tally = RunTally()
    file = open_event_log(config.event_log)
    workload = load.workload(model.vocab_size, token_round=0)
    by_tenant = TenantTally()
    if options.tenants is not None:
        workload = with_tenants(workload, parse_shares(options.tenants), load.seed)
    sinks: list[EventSink] = [tally] if options.tenants is None else [tally, by_tenant]
    try:
        feed = RequestFeed(workload, load.max_concurrency)
        result = simulate(feed, sim, cost_model, EventBroadcaster(*sinks, *([] if file is None else [file])))
    finally:
        if file is not None:
            file.close()
    constants = cost_model.constants()
    if recorded is not None:
        constants.append(("recorded engine", _engine_line(recorded)))
    engine = sim.engine_started()
    if recorded is not None and sim.model is None:
        engine = replace(engine, model=recorded.model)
    return SimulationResult(engine, load, constants, tally.result(), result, by_tenant.figures)


def find_model(name: str | None, device: Device) -> ModelShape:
    """A shape by name, or that of a model's files, in the type that the device computes in.

    Raises:
        ModelLoadError: there is no such model.
    """
    name = name or DEFAULT_MODEL
    if name in MODEL_SHAPES:
        return replace(
            MODEL_SHAPES[name], bytes_per_weight=device.bytes_per_value, bytes_per_kv_value=device.bytes_per_value
        )
    from chairlift.loading.resolve import load_config, resolve_model

    try:
        files = resolve_model(name)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; or a shape: {', '.join(MODEL_SHAPES)}") from None
    return ModelShape.from_config(load_config(files), files.name, device.bytes_per_value)


def sim_config(config: EngineConfig, model: ModelShape, device: Device, num_devices: int = 1) -> SimConfig:
    """The engine's limits, as the planner settles them.

    Raises:
        ConfigError: weights and activations leave no memory for a pool, or max_model_len is more than model or pool
            can serve.
    """
    is_pool_given = config.num_kv_blocks is not None or config.kv_cache_memory is not None
    kind = "cuda" if device.name in DEVICES else "cpu"
    model_config = model.config
    memory = plan_memory(
        PlannedModel(model.name, model.name, model_config, matrix_formats(None, model_config)),
        replace(config, device=kind, dtype=DTYPE_OF_BYTES[device.bytes_per_value], kernels="torch"),
        None if is_pool_given else device.memory_bytes * num_devices,
        FREE_MEMORY_SHARE[kind],
    )
    return SimConfig(
        scheduler=config.scheduler_config(memory.max_model_len),
        num_blocks=memory.pool.num_blocks,
        block_size=config.block_size,
        kv=config.kv,
        kv_arena=config.kv_arena,
        enable_prefix_caching=config.enable_prefix_caching,
        model=model,
    )


def like_recorded(config: EngineConfig, recorded: EngineStarted) -> SimConfig:
    """The pool, the longest request and the token budget of a recorded engine, where `config` does not say otherwise;
    batching, policy and seats are those of `config`.

    Raises:
        ConfigError: max_model_len is more than the pool can serve.
    """
    num_blocks, block_size = recorded.num_blocks, recorded.block_size
    if config.num_kv_blocks is not None or config.kv_cache_memory is not None:
        pool = plan_pool(config, recorded.kv_bytes_per_slot, recorded.max_model_len, 0)
        num_blocks, block_size = pool.num_blocks, pool.block_size
    slots = max_request_slots(config.kv, num_blocks=num_blocks, block_size=block_size, arena=config.kv_arena)
    context = config.max_model_len or recorded.max_model_len
    max_model_len = resolve_max_model_len(replace(config, block_size=block_size), context, num_blocks, slots)
    token_budget = max(recorded.max_num_batched_tokens, config.max_num_seqs)
    return SimConfig(
        scheduler=config.scheduler_config(max_model_len, token_budget),
        num_blocks=num_blocks,
        block_size=block_size,
        kv=config.kv,
        kv_arena=config.kv_arena,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _engine_line(engine: EngineStarted) -> str:
    batching = f"static({engine.static_batch_size})" if engine.batching == "static" else engine.batching
    return (
        f"{engine.model}, {batching}/{engine.kv}, {engine.num_blocks:,} blocks of {engine.block_size}, max_model_len "
        f"{engine.max_model_len:,}, max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens "
        f"{engine.max_num_batched_tokens}"
    )


def _cost_model(model: ModelShape, device: Device, options: SimulationOptions, log: list[Event] | None) -> CostModel:
    if log is None:
        return Roofline(model, device, options.tensor_parallel_size)
    return fit_cost_model(log, str(options.fitted_to))


def _read_log(path: Path) -> list[Event]:
    try:
        return list(read_events(path))
    except OSError as error:
        raise ConfigError(f"fitted_to={path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"fitted_to={path}: {error}") from None


def print_simulation(result: SimulationResult, file: TextIO | None = None) -> None:
    """The constants first, then the figures, and the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    print_constants([*result.constants, *_limits(result.engine)], out)
    console = Console(file=out)
    console.print(_table(result))
    if result.tenants:
        console.print(tenant_table(result.tenants))
    if result.result.rejected:
        console.print(_refusals(result.result.rejected), markup=False, highlight=False)
    out.write(json_line(result.to_dict()))


def _limits(engine: EngineStarted) -> list[tuple[str, str]]:
    batching = engine.batching
    if engine.static_batch_size is not None:
        batching = f"static, {engine.static_batch_size} requests, run to {engine.static_run_to}"
    kv = engine.kv if engine.kv_arena is None else f"{engine.kv}, {engine.kv_arena} arena"
    cache = "on" if engine.enable_prefix_caching else "off"
    return [
        ("batching", batching),
        ("kv", f"{kv}, prefix cache {cache}"),
        ("KV pool", f"{engine.num_blocks:,} blocks of {engine.block_size} = {engine.num_blocks * engine.block_size:,}"),
        ("max_num_seqs", f"{engine.max_num_seqs:,}"),
        ("max_num_batched_tokens", f"{engine.max_num_batched_tokens:,}"),
        ("max_model_len", f"{engine.max_model_len:,}"),
    ]


def _table(result: SimulationResult) -> Table:
    run, sim = result.run, result.result
    table = Table(
        title=f"{result.engine.model}, simulated: {run.num_requests} requests {load_arrivals(result.load)}",
        caption=f"{load_lengths(result.load)}\n{sim.num_steps:,} steps, {number(sim.seconds)} s, simulated in "
        f"{number(sim.wall_seconds)} s ({sim.steps_per_wall_second:,.0f} steps/s)",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("simulated", justify="right")
    table.add_column("unit")
    for metric in REPORTED_METRICS:
        if (value := metric.value(run)) is not None:
            table.add_row(metric.label, number(value * metric.scale), metric.unit)
    return table


def _refusals(refused: Sequence[tuple[str, str]]) -> str:
    return f"{len(refused)} requests can never fit and were refused; the first: {refused[0][1]}"
