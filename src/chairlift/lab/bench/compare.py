"""`chairlift bench compare`: runs the same requests under several policies on one loaded model and one KV memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_decoder
from chairlift.engine.startup.pool_plan import kv_slot_bytes, plan_layout
from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS, EngineStarted, EventBroadcaster, EventList, EventSink
from chairlift.lab.bench.bench_options import CompareOptions
from chairlift.lab.bench.benchmark_result import BenchmarkResult, RunValues, engine_limits, engine_policies
from chairlift.lab.bench.driver import drive_all_at_once, forced_requests, run_forced
from chairlift.lab.bench.workload_options import format_arrivals, format_lengths, text_tokenizer
from chairlift.lab.metrics.run import REPORTED_METRICS
from chairlift.lab.report.recorded_run import recorded_run
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.observability.event_log import encode_event
from chairlift.policy_class import is_paged

logger = logging.getLogger("chairlift")

Configs = Mapping[str, EngineConfig]
"""The configuration of the engine of each policy by name."""

Tokens = dict[str, list[int]]
"""Output tokens by request id."""

RATIOS: Final = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "e2e_latency_mean",
    "e2e_latency_p50",
    "e2e_latency_p99",
    "ttft_p50",
    "ttft_p99",
    "goodput",
)
"""The metrics whose range and ratio to the baseline are also shown."""

_KEYS: Final = ("mean_batch_size", "mean_busy_seats", "mean_batch_tokens", *SLOT_KINDS, "waste", "padding_tokens",
                "recomputed_tokens", "preemptions", "length_error_mean", "length_coverage", "slo_attainment",
                "qoe_mean", *RATIOS)  # fmt: skip
WASTED: Final = ("reserved", "internal", "external")
"""The kinds of slots that hold nothing and cannot be used by another request."""

COMPARED: Final = tuple(metric for key in _KEYS for metric in REPORTED_METRICS if metric.key == key)
"""The metrics of a comparison in the order of the table: counts, which the policies determine, and then speeds."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first output token of a request that differs from the baseline's token."""

    round: int
    request_id: str
    policy: str
    position: int


@dataclass(slots=True)
class TokenCheck:
    """Whether all policies generated the same tokens for every request.

    Policies change only what is computed together. Greedy tokens may therefore differ only by rounding: if two tokens
    are almost equally likely, or if the data type has few digits.

    Attributes:
        dtype: the data type of the computation.
        num_requests: number of requests of all rounds.
        num_same: number of requests with the same tokens under every policy.
        first_difference: the first difference; None if there is none.
    """

    dtype: str
    num_requests: int = 0
    num_same: int = 0
    first_difference: TokenDifference | None = None

    @property
    def is_same(self) -> bool:
        return self.num_same == self.num_requests

    @property
    def is_sound(self) -> bool:
        """False if tokens differ although the computation is in float32."""
        return self.is_same or self.dtype != "float32"

    def add_round(self, number: int, tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Compare the output tokens of one round, by policy and request id."""
        (_, first), *others = tokens.items()
        for request_id, expected in first.items():
            self.num_requests += 1
            different = next((policy for policy, answers in others if answers[request_id] != expected), None)
            if different is None:
                self.num_same += 1
            elif self.first_difference is None:
                pairs = zip(tokens[different][request_id], expected, strict=True)
                position = next(i for i, (token, other) in enumerate(pairs) if token != other)
                self.first_difference = TokenDifference(number, request_id, different, position)

    def describe(self) -> str:
        """State whether the policies generated the same tokens."""
        text = f"same tokens: {'yes' if self.is_same else 'NO'}, {self.num_same} of {self.num_requests} requests"
        first = self.first_difference
        if first is None:
            return text
        return (
            f"{text}; the first difference: round {first.round}, request {first.request_id}, {first.policy}, "
            f"output token {first.position} (in {self.dtype})"
        )


def run_compare(
    config: EngineConfig, options: CompareOptions, events: EventSink | None = None
) -> tuple[BenchmarkResult, TokenCheck]:
    """Load the model once, warm up every policy, and run the rounds; returns the runs of all policies, and whether they
    generated the same tokens.

    Every run has a separate engine over the same weights and the same KV memory, so no run finds blocks of another
    one in the prefix cache.

    Args:
        config: the fields that the policies have in common.
        events: receives the events of all measured runs, in the order of the runs.

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
    loaded = load_decoder(config)
    configs = _equalize_limits(loaded, configs)
    max_model_len = next(iter(configs.values())).max_model_len
    assert max_model_len is not None
    workloads = [
        with_max_tokens(options.workload(loaded.config.vocab_size, number, tokenize, max_model_len), max_model_len)
        for number in range(options.repeats + 1)
    ]
    for name in configs:
        _warm_up(loaded, configs[name], workloads, options.num_warmups)
    rounds = _Rounds(loaded, configs, options, events)
    for workload in workloads[1:]:
        rounds.run(workload)
    return rounds.result([item.max_output_len for workload in workloads[1:] for item in workload])


def _equalize_limits(loaded: LoadedDecoder, configs: Configs) -> dict[str, EngineConfig]:
    """Give all engines the same pool and the same max_model_len: the smallest of the policies unless it is given."""
    plan = build_engine(next(iter(configs.values())), loaded=loaded).facts.kv_cache_plan
    pooled = {
        name: replace(config, num_kv_blocks=_num_blocks(plan, loaded, config), kv_cache_memory_bytes=None)
        for name, config in configs.items()
    }
    engines = [build_engine(config, loaded=loaded) for config in pooled.values()]
    max_model_len = min(engine.facts.scheduler_config.max_model_len for engine in engines)
    return {name: replace(config, max_model_len=max_model_len) for name, config in pooled.items()}


def _num_blocks(plan: KVCachePlan, loaded: LoadedDecoder, config: EngineConfig) -> int:
    """The number of blocks of this configuration that the pool has memory for. Blocks differ in size if one policy has
    several groups of layers (see `models.kv_layout`)."""
    layout = plan_layout(config, loaded.config)
    slot_bytes = kv_slot_bytes(loaded.config, loaded.choice.kv_cache_dtype, layout)
    return plan.num_blocks * plan.block_bytes // (slot_bytes * config.block_size)


def with_max_tokens(workload: Sequence[WorkloadRequest], max_model_len: int) -> list[WorkloadRequest]:
    """Set `max_tokens` of the requests without it to the largest value that fits max_model_len, except for those that
    continue others, whose prompts are not known yet."""
    return [
        item
        if item.max_tokens is not None or item.continues is not None
        else replace(item, max_tokens=max(item.output_len, max_model_len - len(item.prompt_token_ids)))
        for item in workload
    ]


def _warm_up(
    loaded: LoadedDecoder, config: EngineConfig, workloads: Sequence[Sequence[WorkloadRequest]], num_warmups: int
) -> None:
    """Check that all requests fit, then run the first requests of the first workload."""
    engine = build_engine(config, loaded=loaded)
    for workload in workloads:
        forced_requests(engine, workload)
    drive_all_at_once(engine, workloads[0][:num_warmups])


class _Rounds:
    """Runs the rounds: all policies serve one workload, in an order that rotates (A B C, B C A, C A B)."""

    def __init__(
        self, loaded: LoadedDecoder, configs: Configs, options: CompareOptions, events: EventSink | None
    ) -> None:
        self._loaded = loaded
        self._sinks = () if events is None else (events,)
        self._configs = configs
        self._options = options
        self._order: list[list[str]] = []
        self._engines: dict[str, EngineStarted] = {}
        self._runs: dict[str, list[RunValues]] = {name: [] for name in configs}
        self._unsaturated: dict[str, None] = {}
        self._tokens = TokenCheck(loaded.choice.dtype)

    def run(self, workload: Sequence[WorkloadRequest]) -> None:
        """Run one round."""
        names = list(self._configs)
        shift = len(self._order) % len(names)
        order = names[shift:] + names[:shift]
        self._order.append(order)
        tokens = {name: self._run(name, workload) for name in order}
        self._tokens.add_round(len(self._order), {name: tokens[name] for name in names})

    def _run(self, name: str, workload: Sequence[WorkloadRequest]) -> Tokens:
        log = EventList()
        sink = EventBroadcaster(log, *self._sinks)
        engine = build_engine(self._configs[name], loaded=self._loaded, events=sink)
        tokens = run_forced(engine, log, workload, self._options.max_concurrency)
        self._engines.setdefault(name, engine.facts.started)
        run = recorded_run(log.events)
        waste = run.waste()
        if not waste.is_saturated:
            self._unsaturated[name] = None
        wasted = sum(waste.shares[kind] for kind in WASTED)
        self._runs[name].append(run.metrics.values() | waste.shares | {"waste": wasted})
        number, repeats, speed = len(self._order), self._options.repeats, run.metrics.output_tokens_per_s
        logger.info("round %d of %d, %s: %.1f output tokens/s", number, repeats, name, speed)
        if number == 1 and not is_paged(self._configs[name].kv) and run.metrics.peak_batch_size == 1 < len(workload):
            logger.warning("%s: %s", name, _one_at_a_time(engine.facts.started, workload))
        if number == 1 and self._options.save_events is not None:
            _save_events(log, self._options.save_events / f"{name.replace('/', '-').replace(':', '-')}.jsonl")
        return tokens

    def result(self, max_tokens: Sequence[int]) -> tuple[BenchmarkResult, TokenCheck]:
        """The result of all rounds, whose requests declare these `max_tokens`."""
        baseline, engines = next(iter(self._configs)), {name: self._engines[name] for name in self._configs}
        run, low, high, dtype = self._runs[baseline][0], min(max_tokens), max(max_tokens), self._loaded.choice.dtype
        slots = "KV slots: by the true lengths, mean over the steps in which requests waited"
        if self._unsaturated:
            slots += f" ({', '.join(self._unsaturated)}: over all steps, because no request waited)"
        benchmark = BenchmarkResult(
            benchmark="compare",
            title=f"{engines[baseline].model}: {run['num_requests']} requests {format_arrivals(self._options)}, "
            f"{run['prompt_tokens']:,} prompt and {run['output_tokens']:,} output tokens; {len(self._order)} "
            f"{'round' if len(self._order) == 1 else 'rounds'} with one run of each policy",
            options=self._options,
            engines=engines,
            runs=self._runs,
            metrics=[each for each in COMPARED if any(each.key in run for runs in self._runs.values() for run in runs)],
            ratios=RATIOS,
            notes=[
                f"{dtype}; all policies: {engine_limits(engines[baseline])}",
                *(f"{name}: {engine_policies(engine)}" for name, engine in engines.items()),
                f"{format_lengths(self._options)}; max_tokens of the requests: "
                f"{high if low == high else f'{low} to {high}'}",
                f"{slots}; batch, mean: with finished rows of static batches; seats with work: without them; KV slots "
                "wasted: reserved, internal and external",
                *(["one round: ratios of speeds need --repeats 2 or more"] if len(self._order) == 1 else []),
            ],
            facts={
                "dtype": dtype,
                "max_tokens": {"min": low, "max": high},
                "order": self._order,
                "tokens": {"same": self._tokens.is_same, **asdict(self._tokens)},
            },
        )
        return benchmark, self._tokens


def _one_at_a_time(engine: EngineStarted, workload: Sequence[WorkloadRequest]) -> str:
    """Why requests ran one after the other, and what to change."""
    return (
        f"requests ran one at a time: with max_model_len={engine.max_model_len} and max_tokens up to "
        f"{max(item.max_output_len for item in workload)}, a pool of {engine.num_blocks * engine.block_size} slots has "
        f"space for one reservation. Lower --max-model-len and --max-tokens, or enlarge the pool."
    )


def _create_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_events={folder}: {error.strerror}; give a folder that can be written") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"save_events={folder}: it is not writable; give a folder that can be written")


def _save_events(log: EventList, path: Path) -> None:
    """Write an event log. An error is logged, so that the comparison continues."""
    try:
        path.write_bytes(b"".join(encode_event(event) + b"\n" for event in log.events))
    except OSError as error:
        logger.warning("save_events: %s: %s", path, error.strerror)
