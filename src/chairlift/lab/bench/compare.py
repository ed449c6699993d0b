"""Policies side by side: one loaded model, one KV memory, the same requests, in turns."""

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
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList, to_json
from chairlift.lab.bench.comparison_result import COMPARED, PolicyRun, TokenCheck, figure_spread, multiple_spread
from chairlift.lab.bench.decode_speed import SpeedCheck
from chairlift.lab.bench.driver import drive, drive_all_at_once, forced_requests
from chairlift.lab.bench.load import LoadOptions, at_least, first_requests, text_tokenizer
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.lab.bench.policies import Policy
from chairlift.lab.bench.throughput import WARM_UP_ROUND
from chairlift.lab.workload.anyscale import PROMPT_LEN, AnyscaleLengths
from chairlift.lab.workload.arrivals import BurstArrivals
from chairlift.lab.workload.lengths import FixedLength, parse_lengths
from chairlift.lab.workload.request import WorkloadRequest, full_prompt_lens
from chairlift.lab.workload.synthetic import make_workload

logger = logging.getLogger("chairlift")

Configs = Mapping[str, EngineConfig]
"""The engine of each policy, by the policy's name."""

Tokens = dict[str, list[int]]
"""Output tokens by request."""

PUBLISHED: Final = "anyscale:"

PROBE_ROWS: Final = 4
PROBE_LEN: Final = 64
PROBE_ROUNDS: Final = 3
PROBE_TOKENS: Final = 1 << 20
"""Rounds of tokens from here on are the probe's, so that no other request has its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(LoadOptions):
    """A load of greedy requests with forced lengths, and the policies that serve it.

    `max_tokens`, which decides what kv=exact reserves: where neither it nor the trace says what requests declare, they
    declare what fits max_model_len beside the prompt, as users do who leave max_tokens out.

    Attributes:
        policies: the first is what the others are compared with.
        static_batch_size: members of a static batch at most; kv_arena: where reservations come from. As in
            EngineConfig if None.
        repeats: rounds, in each of which every policy serves the same requests once. Rounds differ in their tokens.
        num_warmup: requests of an unmeasured run under every policy before them.
        save_events: a folder for one event log a policy, of the first round.
    """

    policies: tuple[Policy, ...]
    static_batch_size: int | None = None
    kv_arena: str | None = None
    repeats: int = 3
    num_warmup: int = 4
    save_events: Path | None = None

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        at_least("repeats", self.repeats, 1)
        at_least("num_warmup", self.num_warmup, 0)
        names = ", ".join(policy.name for policy in self.policies)
        if self.static_batch_size is not None and not any(policy.is_static for policy in self.policies):
            raise ConfigError(f"static_batch_size={self.static_batch_size}: none of {names} is static; leave it out")
        if self.kv_arena is not None and not any(policy.reserves for policy in self.policies):
            raise ConfigError(f"kv_arena={self.kv_arena}: none of {names} reserves; leave it out")


def published_lengths(
    workload: str, prompt_len: str | None, output_len: str | None, trace: Path | None
) -> tuple[str, str]:
    """The prompt and output lengths of a published workload: anyscale:CAP[/DIVISOR] (see `workload.anyscale`).

    Args:
        prompt_len: instead of the published one, which is divided in the same way.

    Raises:
        ConfigError: an unknown workload, or something else says what the lengths are.
    """
    if not workload.startswith(PUBLISHED):
        raise ConfigError(f"workload {workload!r} is unknown; known is {AnyscaleLengths.syntax}")
    if output_len is not None or trace is not None:
        other = f"trace={trace}" if output_len is None else f"output_len={output_len}"
        raise ConfigError(f"workload={workload} has output lengths, and so has {other}: give one of them")
    outputs = parse_lengths(workload)
    assert isinstance(outputs, AnyscaleLengths)
    return prompt_len or f"fixed:{-(-PROMPT_LEN // outputs.divisor)}", str(outputs)


@dataclass(frozen=True, slots=True)
class CompareResult:
    """What `run_compare` measured, and on what.

    Attributes:
        engines: the limits of each policy's engine.
        max_tokens: the least and the most that a request declared.
        order: the policies of each round, in their turns.
        runs: of each policy, one a round.
        speeds: of a few requests that run at once under every policy, so that all do the same.
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
    def first(self) -> str:
        """The policy that the others are compared with."""
        return self.options.policies[0].name

    @property
    def is_sound(self) -> bool:
        """False if tokens differ although the type has digits enough to tell them apart."""
        return self.tokens.is_same or self.dtype != "float32"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; seconds, bytes and shares, whatever the units of the table."""
        return {
            "benchmark": "compare",
            "machine": self.machine.to_dict(),
            "dtype": self.dtype,
            "workload": asdict(self.options),
            "max_tokens": {"min": self.max_tokens[0], "max": self.max_tokens[1]},
            "first": self.first,
            "order": self.order,
            "policies": {name: self._policy(name) for name in self.runs},
            "tokens": {"same": self.tokens.is_same, **asdict(self.tokens)},
            "decode_speed": self.speeds.to_dict(),
            "peak_rss_bytes": self.peak_rss_bytes,
        }

    def _policy(self, name: str) -> dict[str, Any]:
        runs, first = self.runs[name], self.runs[self.first]
        spreads = {figure.key: figure_spread(figure, runs) for figure in COMPARED}
        multiples = {figure.key: multiple_spread(figure, runs, first) for figure in COMPARED if figure.has_multiple}
        return {
            "engine": asdict(self.engines[name]),
            "results": {key: spread and asdict(spread) for key, spread in spreads.items()},
            "multiples": {key: spread and asdict(spread) for key, spread in multiples.items()},
            "runs": [run.to_dict() for run in runs],
        }


def run_compare(config: EngineConfig, options: CompareOptions) -> CompareResult:
    """Load the model once, warm every policy up, and let them serve the same requests in turns.

    Every run has an engine of its own over the same weights and the same KV memory, so nothing that one run left in
    the prefix cache can serve another.

    Args:
        config: what the policies have in common.

    Raises:
        ConfigError: an option that cannot be honoured, or a workload with a request that does not fit an engine.
        ModelLoadError: the model cannot be had.
    """
    tokenize = None if config.skip_tokenizer_init else text_tokenizer(config.model)
    config = replace(config, skip_tokenizer_init=True)
    configs: Configs = {
        policy.name: policy.config(config, options.static_batch_size, options.kv_arena) for policy in options.policies
    }
    _make_folder(options.save_events)
    loaded = load_model(config)
    configs = _settle(loaded, configs)
    workloads = [
        _declare(options.workload(loaded.config.vocab_size, WARM_UP_ROUND + number, tokenize), configs)
        for number in range(options.repeats + 1)
    ]
    for name in configs:
        _warm_up(loaded, configs[name], workloads, options.num_warmup)
    speeds = _probe(loaded, configs, options)
    rounds = _Rounds(loaded, configs, options)
    for workload in workloads[1:]:
        rounds.serve(workload)
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


def _settle(loaded: LoadedModel, configs: Configs) -> dict[str, EngineConfig]:
    """The same pool and the same max_model_len for all: as long as the strictest policy allows, unless given."""
    plan = build_engine(next(iter(configs.values())), loaded=loaded).kv_cache_plan
    pooled = {
        name: replace(config, num_kv_blocks=plan.num_blocks, kv_cache_memory=None) for name, config in configs.items()
    }
    engines = [build_engine(config, loaded=loaded) for config in pooled.values()]
    max_model_len = min(engine.scheduler_config.max_model_len for engine in engines)
    return {name: replace(config, max_model_len=max_model_len) for name, config in pooled.items()}


def _declare(workload: Sequence[WorkloadRequest], configs: Configs) -> list[WorkloadRequest]:
    """Who does not say how many tokens he wants at most wants as many as fit."""
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
    loaded: LoadedModel, config: EngineConfig, workloads: Sequence[Sequence[WorkloadRequest]], num_warmup: int
) -> None:
    """Refuse what does not fit before anything is measured; then run the first requests of the first workload."""
    engine = build_engine(config, loaded=loaded)
    for workload in workloads:
        forced_requests(engine, workload)
    drive_all_at_once(engine, first_requests(workloads[0], num_warmup))


def _probe(loaded: LoadedModel, configs: Configs, options: CompareOptions) -> SpeedCheck:
    """How fast decode steps are, where every policy runs the same few requests of one length, all at once."""
    limits = [config.scheduler_config(config.max_model_len or 0) for config in configs.values()]
    num_rows = min(limit.static_batch_size if limit.batching == "static" else limit.max_num_seqs for limit in limits)
    length = FixedLength(max(1, min(PROBE_LEN, limits[0].max_model_len // 4)))
    options = replace(options, repeats=PROBE_ROUNDS, max_concurrency=None, save_events=None)
    rounds = _Rounds(loaded, configs, options, title="equal work")
    for number in range(PROBE_ROUNDS):
        count = min(num_rows, PROBE_ROWS)
        vocab_size = loaded.config.vocab_size
        workload = make_workload(
            options.seed, count, length, length, BurstArrivals(), vocab_size, token_round=PROBE_TOKENS + number
        )
        rounds.serve(workload)
    return SpeedCheck.of({name: [run.step_speeds for run in runs] for name, runs in rounds.runs.items()})


class _Rounds:
    """Serves one workload a round under all policies, whose turns rotate: A B C, B C A, C A B."""

    def __init__(self, loaded: LoadedModel, configs: Configs, options: CompareOptions, title: str = "round") -> None:
        self._title = title
        self._loaded = loaded
        self._configs = configs
        self._options = options
        self.order: list[list[str]] = []
        self.engines: dict[str, EngineStarted] = {}
        self.runs: dict[str, list[PolicyRun]] = {name: [] for name in configs}
        self.tokens = TokenCheck()

    def serve(self, workload: Sequence[WorkloadRequest]) -> None:
        names = list(self._configs)
        shift = len(self.order) % len(names)
        turns = names[shift:] + names[:shift]
        self.order.append(turns)
        tokens = {name: self._run(name, workload) for name in turns}
        self.tokens.take(len(self.order), {name: tokens[name] for name in names})

    def _run(self, name: str, workload: Sequence[WorkloadRequest]) -> Tokens:
        log = EventList()
        engine = build_engine(self._configs[name], loaded=self._loaded, events=log)
        tokens = drive(engine, workload, self._options.max_concurrency)
        for item in workload:
            assert len(tokens[item.request_id]) == item.output_len, "a forced length was missed"
        run = PolicyRun.of(log.events)
        self.engines.setdefault(name, engine.started)
        self._note(name, log, run)
        return tokens

    def _note(self, name: str, log: EventList, run: PolicyRun) -> None:
        self.runs[name].append(run)
        number, repeats = len(self.order), self._options.repeats
        speed = run.metrics.output_tokens_per_s
        logger.info("%s %d of %d, %s: %.1f output tokens/s", self._title, number, repeats, name, speed)
        if number == 1 and self._options.save_events is not None:
            _save(log, self._options.save_events / f"{name.replace('/', '-')}.jsonl")


def _make_folder(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_events={folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"save_events={folder}: the folder is not writable")


def _save(log: EventList, path: Path) -> None:
    """A log that cannot be written any more costs a warning, not the comparison."""
    try:
        path.write_text("".join(f"{to_json(event)}\n" for event in log.events), encoding="utf-8")
    except OSError as error:
        logger.warning("save_events: %s: %s", path, error.strerror)
