"""`chairlift simulate` without a preset: runs a workload on a simulated engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from rich.console import RenderableType

from chairlift.config import KV_ARENAS, KV_POLICIES, EngineConfig
from chairlift.core.kv.kv_groups import FULL
from chairlift.counts import counted
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.progress import AdvanceBar, progress_bar
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.engine.startup.pool_plan import FREE_MEMORY_SHARE, CacheSizes, plan_pool, planned_pool
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.events import EngineStarted, Event, EventBroadcaster, RequestRejected, Step, read_events
from chairlift.lab.bench.benchmark_result import engine_limits, engine_policies
from chairlift.lab.bench.policies import ComparedPolicy, parse_policies
from chairlift.lab.bench.policy_values import check_values_file
from chairlift.lab.bench.workload_options import WorkloadOptions, format_arrivals, format_lengths
from chairlift.lab.metrics.run import REPORTED_METRICS, RunMetrics, RunTally
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.devices import DEVICES, Device, find_device
from chairlift.lab.sim.fitted_cost_model import FittedCostModel, fit_cost_model
from chairlift.lab.sim.kernel_roofline import device_roofline
from chairlift.lab.sim.model_shape import MODEL_SHAPES, ModelShape
from chairlift.lab.sim.roofline import Roofline, block_copy_seconds
from chairlift.lab.sim.simulator import SimConfig, SimResult, simulate
from chairlift.lab.tables import constants_table, make_table, number, print_report
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.loading.model_source import declared_formats
from chairlift.loading.resolve import resolve_model
from chairlift.observability.event_log import EventFile
from chairlift.options import check_options, option, split_names
from chairlift.policy_class import KV_BASE, is_paged
from chairlift.step_time import RowTime, StepTime

DEFAULT_MODEL = "opt-13b"
DEFAULT_DEVICE = "A100-40GB"
DTYPE_OF_BYTES = {1: "float16", 2: "float16", 4: "float32"}
"""The data type of the memory plan, by the size in bytes of the device's values; it is at least half precision."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The simulated policies and device, the source of the step times, and the file for the values.

    Raises:
        ConfigError: tensor_parallel_size and fitted_to, or kv and a policy whose name has one, are both given, or the
            file cannot be written.
    """

    OPTION_GROUP: ClassVar = "Simulation"

    policies: tuple[ComparedPolicy, ...] | None = option(
        None,
        "Policies that serve the same requests, named as in bench compare, such as fcfs,srpt:oracle,static/max. "
        "Default: that of the other options.",
        parse=parse_policies,
    )
    kv: tuple[str, ...] | None = option(
        None,
        f"KV memory policies, such as paged,exact, of {', '.join(KV_POLICIES)} and module:Class, each with each of "
        "--policies. Default: paged, or that of --policies.",
        parse=split_names,
        choices=KV_POLICIES,
        base_class=KV_BASE,
        short_name="--kv-policy",
    )
    static_batch_size: int | None = option(
        None, "Maximum number of requests in a static batch. Default: the smaller of 8 and --max-num-seqs.", minimum=1
    )
    kv_arena: str | None = option(None, "Allocator of reservations. Default: buddy.", choices=KV_ARENAS)
    output: Path | None = option(
        None,
        "File for the values: .csv has a row for each policy; .png, .pdf and .svg have a picture by matplotlib.",
    )
    device: str = option(DEFAULT_DEVICE, "A100-40GB, A100-80GB, H100-SXM, H200, or a file of --calibrate.")
    tensor_parallel_size: int = option(1, "Number of devices that share the model.")
    fitted_to: Path | None = option(
        None,
        "Event log of a run: step times are a fit to its steps instead of a roofline, and the device determines only "
        "the size of the pool.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.fitted_to is not None and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is a parameter of the roofline, which fitted_to "
                f"replaces: leave one of them out"
            )
        named = [policy.name for policy in self.policies or () if policy.names_kv]
        if self.kv is not None and named:
            raise ConfigError(
                f"kv={','.join(self.kv)} replaces the KV policy in {', '.join(named)}: leave one of them out"
            )
        if self.output is not None:
            check_values_file(self.output)

    def configs(self, base: EngineConfig) -> dict[str, EngineConfig]:
        """The configuration of the engine of each policy by its name, which is empty if it is the only one. Raises
        ConfigError if `base` excludes a policy, or an option has no effect."""
        policies, memories = self.policies or (None,), self.kv or (None,)
        made: dict[str, EngineConfig] = {}
        for policy, kv in product(policies, memories):
            chosen = policy or ComparedPolicy("", base.batching, base.kv, base.static_run_to)
            chosen = chosen if kv is None else replace(chosen, kv=kv)
            name = " over ".join(part for part in (chosen.name, kv) if part)
            made[name] = chosen.config(base, self.static_batch_size, self.kv_arena)
        size = self.static_batch_size
        if size is not None and all(each.batching != "static" for each in made.values()):
            raise ConfigError(f"static_batch_size={size}: none of the policies is static; leave it out")
        if self.kv_arena is not None and all(is_paged(each.kv) for each in made.values()):
            raise ConfigError(f"kv_arena={self.kv_arena}: none of the policies reserves; leave it out")
        return made if len(made) > 1 else {"": next(iter(made.values()))}


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The metrics of a simulated run, with the engine, the workload and the constants of the cost model."""

    engine: EngineStarted
    load: WorkloadOptions
    constants: list[tuple[str, str]]
    run: RunMetrics
    result: SimResult

    @property
    def policy(self) -> str:
        """The name of the simulated policy, as in --policies."""
        engine = self.engine
        batching = "static-global" if engine.static_run_to == "global" else engine.batching
        predictor = "" if engine.length_predictor == "none" else f":{engine.length_predictor}"
        return f"{batching}/{engine.kv}/{engine.scheduling_policy}{predictor}"

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in seconds and shares."""
        return {
            "benchmark": "simulate",
            "engine": asdict(self.engine),
            "workload": asdict(self.load),
            "constants": dict(self.constants),
            "results": asdict(self.run),
            "num_steps": self.result.num_steps,
            "simulated_seconds": self.result.seconds,
            "wall_seconds": self.result.wall_seconds,
            "steps_per_wall_second": self.result.steps_per_wall_second,
            "rejected": self.result.rejected,
        }


@dataclass(frozen=True, slots=True)
class ProgressSink:
    """An event sink that advances a progress bar by the requests that have ended."""

    advance: AdvanceBar

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self.advance(len(event.finished))
        elif isinstance(event, RequestRejected):
            self.advance()


def run_simulations(
    config: EngineConfig, load: WorkloadOptions, options: SimulationOptions
) -> dict[str, SimulationResult]:
    """Simulate the workload on the engine of each policy. All have the smallest max_model_len of them.

    Raises:
        ConfigError: an option cannot be honoured (the message has the arithmetic), or a file has the wrong format.
        ModelLoadError: the configuration of the model cannot be loaded.
    """
    device = find_device(options.device)
    model = find_model(config.model, device)
    log = None if options.fitted_to is None else list(read_events(options.fitted_to))
    cost_model: Roofline | FittedCostModel = device_roofline(model, device, options.tensor_parallel_size)
    if log is not None:
        cost_model = fit_cost_model(log, str(options.fitted_to))
    recorded = next((event for event in log or () if isinstance(event, EngineStarted)), None)

    def planned(each: EngineConfig) -> SimConfig:
        if recorded is not None and config.model is None:
            return sim_config_from_recording(each, recorded)
        return sim_config(each, model, device, options.tensor_parallel_size)

    configs = options.configs(config)
    if len(configs) > 1 and config.event_log is not None:
        raise ConfigError(f"event_log={config.event_log} has one run, got {len(configs)} policies: simulate one")
    limit = min(planned(each).scheduler.max_model_len for each in configs.values())
    workload = load.workload(model.vocab_size, token_round=0, max_model_len=limit)
    constants, results = _constants(cost_model, recorded), {}
    with progress_bar("simulated requests", len(workload) * len(configs)) as advance:
        for name, each in configs.items():
            sim = planned(replace(each, max_model_len=limit))
            feed = RequestFeed(workload, load.max_concurrency)
            run, result = _simulate(sim, feed, cost_model, config.event_log, advance)
            engine = sim.engine_started()
            if recorded is not None and sim.model is None:
                engine = replace(engine, model=recorded.model)
            results[name] = SimulationResult(engine, load, constants, run, result)
    return results


def _simulate(
    sim: SimConfig, feed: RequestFeed, cost_model: CostModel, event_log: Path | None, advance: AdvanceBar
) -> tuple[RunMetrics, SimResult]:
    tally = RunTally()
    with ExitStack() as stack:
        files = [] if event_log is None else [stack.enter_context(closing(EventFile(event_log)))]
        result = simulate(feed, sim, cost_model, EventBroadcaster(tally, ProgressSink(advance), *files))
    return tally.result(), result


def _constants(cost_model: Roofline | FittedCostModel, recorded: EngineStarted | None) -> list[tuple[str, str]]:
    constants = cost_model.constants()
    if recorded is not None:
        constants += [("recorded engine", recorded.model), *_engine_rows(recorded, "recorded ")]
    return constants


def find_model(name: str | None, device: Device) -> ModelShape:
    """Resolve the name of a shape or of a model to a shape in the data type of the device.

    Raises:
        ModelLoadError: the name is neither a shape nor a model.
    """
    name = name or DEFAULT_MODEL
    if name in MODEL_SHAPES:
        return replace(
            MODEL_SHAPES[name], bytes_per_weight=device.bytes_per_value, bytes_per_kv_value=device.bytes_per_value
        )
    try:
        source = resolve_model(name)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}; or a shape: {', '.join(MODEL_SHAPES)}") from None
    return ModelShape(source.name, source.decoder_config(), device.bytes_per_value, device.bytes_per_value)


def sim_config(config: EngineConfig, model: ModelShape, device: Device, num_devices: int = 1) -> SimConfig:
    """Compute the limits of the simulated engine with the memory plan.

    Raises:
        ConfigError: weights and activations leave no memory for the pool, or max_model_len exceeds the limit of the
            model or of the pool.
    """
    is_pool_given = config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None
    kind = "cuda" if device.name in DEVICES else "cpu"
    model_config = model.config
    config = replace(config, device=kind, dtype=DTYPE_OF_BYTES[device.bytes_per_value], kernels="torch")
    memory = plan_memory(
        config,
        model_config,
        declared_formats(model_config),
        None if is_pool_given else device.memory_bytes * num_devices,
        FREE_MEMORY_SHARE[kind],
    )
    return SimConfig(
        config.scheduler_config(memory.max_model_len),
        memory.kv_pool,
        enable_prefix_caching=config.enable_prefix_caching,
        model=model,
        block_copy_seconds=block_copy_seconds(config.block_size, model, device),
    )


def sim_config_from_recording(config: EngineConfig, recorded: EngineStarted) -> SimConfig:
    """Take the pool, max_model_len, the token budget and the time of steps from a recorded engine unless `config` has
    them. Batching, policies and max_num_seqs come from `config`.

    Raises:
        ConfigError: max_model_len exceeds the limit of the pool, or the configuration has a swap space, because the
            events of an engine do not show how long a copy takes.
    """
    if config.preemption_mode == "swap":
        raise ConfigError("preemption_mode=swap needs a model and its roofline: give model, or leave fitted_to out")
    token_budget = max(recorded.max_num_batched_tokens, config.max_num_seqs)
    sized = replace(config, max_num_batched_tokens=config.max_num_batched_tokens or token_budget)
    num_blocks = recorded.num_blocks
    has_groups = is_paged(config.kv) and not config.disable_hybrid_kv_cache_manager
    windows = tuple(recorded.kv_windows) if has_groups else FULL
    if not has_groups:
        num_blocks = recorded.num_blocks_of_all_layers(num_blocks)
    plan = KVCachePlan(
        num_blocks,
        recorded.block_size,
        0,
        "memory",
        windows,
        recorded.state_bytes,
        num_checkpoints=recorded.num_checkpoints,
        checkpoint_interval=recorded.checkpoint_interval,
    )
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        slot_bytes = recorded.kv_bytes_per_slot
        if has_groups:
            slot_bytes = recorded.kv_bytes_per_block // recorded.block_size or slot_bytes // len(windows)
        plan = plan_pool(sized, CacheSizes(recorded.max_model_len, slot_bytes, windows, recorded.state_bytes), 0)
    pool = planned_pool(sized, config.max_model_len or recorded.max_model_len, plan)
    step_time = None if recorded.step_time is None else StepTime(**recorded.step_time)
    row_time = None
    if recorded.row_time is not None:
        row_time = RowTime({int(rows): seconds for rows, seconds in recorded.row_time})
    scheduler = config.scheduler_config(pool.max_model_len, token_budget, step_time, row_time)
    return SimConfig(scheduler, pool, enable_prefix_caching=config.enable_prefix_caching)


def _engine_rows(engine: EngineStarted, prefix: str = "") -> list[tuple[str, str]]:
    return [(f"{prefix}policies", engine_policies(engine)), (f"{prefix}limits", engine_limits(engine))]


def print_simulations(results: Mapping[str, SimulationResult], as_json: bool = False) -> None:
    """Print the constants and a table with a column for each policy, or the JSON line."""
    first, values = next(iter(results.values())), {name: each.run.values() for name, each in results.items()}
    steps = [
        f"{name or 'simulated'}: {each.result.num_steps:,} steps, {number(each.result.seconds)} s, simulated in "
        f"{number(each.result.wall_seconds)} s ({each.result.steps_per_wall_second:,.0f} steps/s)"
        for name, each in results.items()
    ]
    table = make_table(
        f"{first.engine.model}, simulated: {first.run.num_requests} requests {format_arrivals(first.load)}",
        ["", *(name or "simulated" for name in results)],
        "\n".join([format_lengths(first.load), *steps]),
        rows=[
            (each.heading, *(each.cell(found.get(each.key)) for found in values.values()))
            for each in REPORTED_METRICS
            if any(each.key in found for found in values.values())
        ],
    )
    engines = [row for name, each in results.items() for row in _engine_rows(each.engine, f"{name} " if name else "")]
    parts: list[RenderableType] = [constants_table([*first.constants, *engines]), table]
    for name, each in results.items():
        if rejected := each.result.rejected:
            text = f"{counted(len(rejected), 'rejected request')} can never fit; the first: {rejected[0][1]}"
            parts.append(f"{name}: {text}" if name else text)
    records = {name: each.to_dict() for name, each in results.items()}
    print_report(parts, records.get("") or {"benchmark": "simulate", "policies": records}, as_json)
