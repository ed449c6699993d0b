"""`chairlift bench compare`: runs the same requests under several policies on one loaded model and one KV memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.engine.startup.memory_plan import kv_slot_bytes
from chairlift.engine.startup.startup_plan import plan_layout
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList, to_json
from chairlift.lab.bench.comparison_result import (
    COMPARED,
    WITH_RATIO,
    PolicyRun,
    SpeedCheck,
    TokenCheck,
    metric_range,
    ratio_range,
)
from chairlift.lab.bench.driver import drive, drive_all_at_once, forced_requests
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.lab.bench.policies import ComparedPolicy
from chairlift.lab.bench.throughput import WARM_UP_ROUND
from chairlift.lab.bench.workload_options import WorkloadOptions, check_minimums, first_requests, text_tokenizer
from chairlift.lab.workload.anyscale import PROMPT_LEN, AnyscaleLengths
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import FixedLength, parse_lengths
from chairlift.lab.workload.request import WorkloadRequest, full_prompt_lens
from chairlift.lab.workload.synthetic import make_workload
from chairlift.worker.kv_cache_plan import KVCachePlan

logger = logging.getLogger("chairlift")

Configs = Mapping[str, EngineConfig]
"""The configuration of the engine of each policy by name."""

Tokens = dict[str, list[int]]
"""Output tokens by request id."""

PUBLISHED: Final = "anyscale:"

PROBE_ROWS: Final = 4
PROBE_LEN: Final = 64
PROBE_ROUNDS: Final = 3
PROBE_TOKEN_ROUND: Final = 1 << 20
"""First token round of the speed check. No other request has its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(WorkloadOptions):
    """A workload of greedy requests with forced lengths, and the policies that serve it.

    `max_tokens` determines the reservations of kv=exact. If neither this option nor the trace has it, it is the largest
    value that fits max_model_len beside the prompt, which is the default of the API too.

    `chairlift bench compare --help` describes each field. The first policy is the baseline. Tokens differ by round.
    """

    policies: tuple[ComparedPolicy, ...]
    static_batch_size: int | None = None
    kv_arena: str | None = None
    repeats: int = 3
    num_warmups: int = 4
    save_events: Path | None = None

    def __post_init__(self) -> None:
        WorkloadOptions.__post_init__(self)
        check_minimums(self, repeats=1, num_warmups=0)
        names = ", ".join(policy.name for policy in self.policies)
        if self.static_batch_size is not None and not any(policy.is_static for policy in self.policies):
            raise ConfigError(f"static_batch_size={self.static_batch_size}: none of {names} is static; leave it out")
        if self.kv_arena is not None and not any(policy.reserves for policy in self.policies):
            raise ConfigError(f"kv_arena={self.kv_arena}: none of {names} reserves; leave it out")


def published_lengths(
    workload: str, input_len: str | None, output_len: str | None, trace: Path | None
) -> tuple[str, str]:
    """Resolve a published workload, anyscale:CAP[/DIVISOR], to its prompt and output lengths (see `workload.anyscale`).

    Args:
        input_len: replaces the published prompt length.

    Raises:
        ConfigError: the workload is unknown, or another option has output lengths too.
    """
    if not workload.startswith(PUBLISHED):
        raise ConfigError(f"workload must have the form {AnyscaleLengths.syntax}, got {workload!r}")
    if output_len is not None or trace is not None:
        other = f"trace={trace}" if output_len is None else f"output_len={output_len}"
        raise ConfigError(f"workload={workload} has output lengths and cannot be combined with {other}: leave one out")
    outputs = parse_lengths(workload)
    assert isinstance(outputs, AnyscaleLengths)
    return input_len or f"fixed:{-(-PROMPT_LEN // outputs.divisor)}", str(outputs)


@dataclass(frozen=True, slots=True)
class CompareResult:
    """The runs of all policies, with the machine and the engines that they belong to.

    Attributes:
        engines: the limits of the engine of each policy.
        max_tokens: the smallest and the largest `max_tokens` of the requests.
        order: the order of the policies in each round.
        runs: the runs of each policy, one for each round.
        tokens: whether all policies generated the same tokens.
        speeds: decode speeds of a few requests that run at the same time under every policy.
    """

    machine: MachineFacts
    options: CompareOptions
    dtype: str
    engines: dict[str, EngineStarted]
    max_tokens: tuple[int, int]
    order: list[list[str]]
    runs: dict[str, list[PolicyRun]]
    tokens: TokenCheck
    speeds: SpeedCheck
    peak_rss_bytes: int | None

    @property
    def baseline(self) -> str:
        """Name of the policy that the others are compared with."""
        return self.options.policies[0].name

    @property
    def is_sound(self) -> bool:
        """False if tokens differ although the computation is in float32."""
        return self.tokens.is_same or self.dtype != "float32"

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in seconds, bytes and shares."""
        return {
            "benchmark": "compare",
            "machine": self.machine.to_dict(),
            "dtype": self.dtype,
            "workload": asdict(self.options),
            "max_tokens": {"min": self.max_tokens[0], "max": self.max_tokens[1]},
            "baseline": self.baseline,
            "order": self.order,
            "policies": {name: self._policy(name) for name in self.runs},
            "tokens": {"same": self.tokens.is_same, **asdict(self.tokens)},
            "decode_speed": self.speeds.to_dict(),
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def _policy(self, name: str) -> dict[str, Any]:
        runs, baseline = self.runs[name], self.runs[self.baseline]
        ranges = {metric.key: metric_range(metric, runs) for metric in COMPARED}
        ratios = {metric.key: ratio_range(metric, runs, baseline) for metric in COMPARED if metric.key in WITH_RATIO}
        return {
            "engine": asdict(self.engines[name]),
            "results": {key: found and asdict(found) for key, found in ranges.items()},
            "ratios": {key: found and asdict(found) for key, found in ratios.items()},
            "runs": [run.to_dict() for run in runs],
        }


def run_compare(config: EngineConfig, options: CompareOptions) -> CompareResult:
    """Load the model once, warm up every policy, and run the rounds.

    Every run has an engine of its own over the same weights and the same KV memory, so no run finds blocks of another
    one in the prefix cache.

    Args:
        config: the fields that the policies have in common.

    Raises:
        ConfigError: an option cannot be honoured, or a request of the workload does not fit an engine.
        ModelLoadError: the model cannot be loaded.
    """
    tokenize = None if config.skip_tokenizer_init else text_tokenizer(config.model)
    # A budget that is given is not limited by the time of a step, which would apply to continuous batching only.
    config = replace(config, skip_tokenizer_init=True, max_num_batched_tokens=config.largest_token_budget)
    configs: Configs = {
        policy.name: policy.config(config, options.static_batch_size, options.kv_arena) for policy in options.policies
    }
    _create_folder(options.save_events)
    loaded = load_model(config)
    configs = _equalize_limits(loaded, configs)
    workloads = [
        _set_max_tokens(options.workload(loaded.config.vocab_size, WARM_UP_ROUND + number, tokenize), configs)
        for number in range(options.repeats + 1)
    ]
    for name in configs:
        _warm_up(loaded, configs[name], workloads, options.num_warmups)
    speeds = _check_decode_speed(loaded, configs, options)
    rounds = _Rounds(loaded, configs, options)
    for workload in workloads[1:]:
        rounds.run(workload)
    declared = [item.max_output_len for workload in workloads[1:] for item in workload]
    return CompareResult(
        machine=machine_facts(),
        options=options,
        dtype=loaded.choice.dtype,
        engines=rounds.engines,
        max_tokens=(min(declared), max(declared)),
        order=rounds.order,
        runs=rounds.runs,
        tokens=rounds.tokens,
        speeds=speeds,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _equalize_limits(loaded: LoadedModel, configs: Configs) -> dict[str, EngineConfig]:
    """Give all engines the same pool and the same max_model_len: the smallest of the policies unless it is given."""
    plan = build_engine(next(iter(configs.values())), loaded=loaded).facts.kv_cache_plan
    pooled = {
        name: replace(config, num_kv_blocks=_num_blocks(plan, loaded, config), kv_cache_memory_bytes=None)
        for name, config in configs.items()
    }
    engines = [build_engine(config, loaded=loaded) for config in pooled.values()]
    max_model_len = min(engine.facts.scheduler_config.max_model_len for engine in engines)
    return {name: replace(config, max_model_len=max_model_len) for name, config in pooled.items()}


def _num_blocks(plan: KVCachePlan, loaded: LoadedModel, config: EngineConfig) -> int:
    """The number of blocks of this configuration that the pool has memory for. Blocks differ in size if one policy has
    several groups of layers (see `models.kv_layout`)."""
    layout = plan_layout(config, loaded.config)
    slot_bytes = kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype, layout)
    return plan.num_blocks * plan.block_bytes // (slot_bytes * config.block_size)


def _set_max_tokens(workload: Sequence[WorkloadRequest], configs: Configs) -> list[WorkloadRequest]:
    """Set `max_tokens` of the requests without it to the largest value that fits max_model_len."""
    max_model_len = next(iter(configs.values())).max_model_len
    assert max_model_len is not None
    lens = full_prompt_lens(workload)
    return [
        item
        if item.max_tokens is not None
        else replace(item, max_tokens=max(item.output_len, max_model_len - lens[item.request_id]))
        for item in workload
    ]


def _warm_up(
    loaded: LoadedModel, config: EngineConfig, workloads: Sequence[Sequence[WorkloadRequest]], num_warmups: int
) -> None:
    """Check that all requests fit, then run the first requests of the first workload."""
    engine = build_engine(config, loaded=loaded)
    for workload in workloads:
        forced_requests(engine, workload)
    drive_all_at_once(engine, first_requests(workloads[0], num_warmups))


def _check_decode_speed(loaded: LoadedModel, configs: Configs, options: CompareOptions) -> SpeedCheck:
    """Measure the decode speed of a few requests of one length that run at the same time under every policy."""
    limits = [config.scheduler_config(config.max_model_len or 0) for config in configs.values()]
    num_rows = min(limit.static_batch_size if limit.batching == "static" else limit.max_num_seqs for limit in limits)
    length = FixedLength(max(1, min(PROBE_LEN, limits[0].max_model_len // 4)))
    options = replace(options, repeats=PROBE_ROUNDS, max_concurrency=None, save_events=None)
    rounds = _Rounds(loaded, configs, options, label="equal work")
    for number in range(PROBE_ROUNDS):
        count = min(num_rows, PROBE_ROWS)
        vocab_size = loaded.config.vocab_size
        workload = make_workload(
            options.seed, count, length, length, ArrivalProcess(), vocab_size, token_round=PROBE_TOKEN_ROUND + number
        )
        rounds.run(workload)
    return SpeedCheck.from_steps({name: [run.step_speeds for run in runs] for name, runs in rounds.runs.items()})


class _Rounds:
    """Runs the rounds: all policies serve one workload, in an order that rotates (A B C, B C A, C A B)."""

    def __init__(self, loaded: LoadedModel, configs: Configs, options: CompareOptions, label: str = "round") -> None:
        self._label = label
        self._loaded = loaded
        self._configs = configs
        self._options = options
        self.order: list[list[str]] = []
        self.engines: dict[str, EngineStarted] = {}
        self.runs: dict[str, list[PolicyRun]] = {name: [] for name in configs}
        self.tokens = TokenCheck()

    def run(self, workload: Sequence[WorkloadRequest]) -> None:
        """Run one round."""
        names = list(self._configs)
        shift = len(self.order) % len(names)
        order = names[shift:] + names[:shift]
        self.order.append(order)
        tokens = {name: self._run(name, workload) for name in order}
        self.tokens.add_round(len(self.order), {name: tokens[name] for name in names})

    def _run(self, name: str, workload: Sequence[WorkloadRequest]) -> Tokens:
        log = EventList()
        engine = build_engine(self._configs[name], loaded=self._loaded, events=log)
        tokens = drive(engine, workload, self._options.max_concurrency)
        for item in workload:
            assert len(tokens[item.request_id]) == item.output_len, "a request has not the forced number of tokens"
        run = PolicyRun.from_events(log.events)
        self.engines.setdefault(name, engine.facts.started)
        self.runs[name].append(run)
        number, repeats, speed = len(self.order), self._options.repeats, run.metrics.output_tokens_per_s
        logger.info("%s %d of %d, %s: %.1f output tokens/s", self._label, number, repeats, name, speed)
        if number == 1 and self._options.save_events is not None:
            _save_events(log, self._options.save_events / f"{name.replace('/', '-')}.jsonl")
        return tokens


def _create_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_events={folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"save_events={folder}: the folder is not writable")


def _save_events(log: EventList, path: Path) -> None:
    """Write an event log. An error is logged, so that the comparison continues."""
    try:
        path.write_text("".join(f"{to_json(event)}\n" for event in log.events), encoding="utf-8")
    except OSError as error:
        logger.warning("save_events: %s: %s", path, error.strerror)
