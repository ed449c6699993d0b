"""The workload of a benchmark: number, lengths, arrivals and tokens of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.agent_sessions import MEDIAN_TURNS, AgentSessions, parse_agent_sessions
from chairlift.lab.workload.arrivals import ArrivalProcess, with_arrivals
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import MAX_NUM_PROMPTS, WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.lab.workload.traces import TraceOptions, read_trace
from chairlift.options import check_options, option
from chairlift.slo import SLO, parse_slo

Tokenize = Callable[[str], Sequence[int]]

DEFAULT_NUM_PROMPTS = 64
DEFAULT_INPUT_LEN = "lognormal:96,0.7,16..512"
DEFAULT_OUTPUT_LEN = "exp:96,8..384"

DETERMINED = {
    "trace": ("input_len", "output_len"),
    "agent_sessions": ("trace", "num_prompts", "input_len", "output_len", "request_rate"),
    "closed_loop": ("request_rate",),
}
"""The options that have no effect, and are rejected, by the option that determines them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Options of a synthetic workload, of sessions of agents or, with `trace`, of a recorded workload.

    Raises:
        ConfigError: a value is out of range. The message names the option, the value and the limit.
    """

    OPTION_GROUP: ClassVar = "Workload"

    num_prompts: int | None = option(
        None, "Number of requests. Default: 64, or all requests of the trace.", minimum=1, maximum=MAX_NUM_PROMPTS
    )
    seed: int = option(0, "Seed of lengths, tokens and arrivals.", name="workload_seed", minimum=0)
    input_len: str | None = option(
        None,
        "Prompt tokens: fixed:N, uniform:A..B, exp:MEAN[,A..B] or lognormal:MEDIAN,SIGMA[,A..B]. "
        f"Default: {DEFAULT_INPUT_LEN}.",
    )
    output_len: str | None = option(None, f"Output tokens, in the same notation. Default: {DEFAULT_OUTPUT_LEN}.")
    max_tokens: int | None = option(
        None, "max_tokens of every request. Default: its true output length, or that of the trace.", minimum=1
    )
    request_rate: float | None = option(
        None, "Arrivals per second. inf starts all requests at once, as does no rate without a trace."
    )
    burstiness: float = option(1.0, "Shape of the gaps between arrivals (a Gamma distribution); 1 is Poisson.")
    max_concurrency: int | None = option(
        None, "Maximum number of concurrent requests (closed loop). Default: no limit.", minimum=1
    )
    trace: Path | None = option(None, "Recorded workload, instead of lengths and arrivals.")
    closed_loop: bool = option(
        False, "Send turns of recorded sessions the recorded gap after the end of the turn before them."
    )
    agent_sessions: AgentSessions | None = option(
        None,
        "Sessions of coding agents, --max-concurrency at a time: NUMBER[,SCALE[,TURNS]]. SCALE multiplies all lengths "
        f"in tokens. Default of SCALE,TURNS: 1,{MEDIAN_TURNS}.",
        parse=parse_agent_sessions,
    )
    goodput: SLO | None = option(
        None,
        "SLO of every request in milliseconds, as ttft:100 tpot:50, whose goodput is measured. Default: none.",
        parse=parse_slo,
        is_repeated=True,
        takes_several=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.trace is None and self.agent_sessions is None:
            for name, default in (
                ("num_prompts", DEFAULT_NUM_PROMPTS),
                ("input_len", DEFAULT_INPUT_LEN),
                ("output_len", DEFAULT_OUTPUT_LEN),
            ):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
        for source, names in DETERMINED.items():
            for name in names:
                if getattr(self, source) and (value := getattr(self, name)) is not None:
                    raise ConfigError(
                        f"{name}={value} cannot be combined with {source}, which determines it: leave one of them out"
                    )
        if self.closed_loop and self.trace is None:
            raise ConfigError("closed_loop requires trace: leave it out, or give a trace of --record-trace")
        for text in (self.input_len, self.output_len):
            if text is not None:
                parse_lengths(text)
        ArrivalProcess(self.request_rate, self.burstiness)

    def workload(
        self, vocab_size: int, token_round: int, tokenize: Tokenize | None = None, max_model_len: int | None = None
    ) -> list[WorkloadRequest]:
        """Create the requests of one round. Rounds differ only in their tokens.

        Args:
            tokenize: converts text to token ids, for a trace with texts.
            max_model_len: sessions of agents end before their context has more tokens; None: no limit of an engine.

        Raises:
            ConfigError: max_tokens is less than an output length, or the trace cannot be read or does not fit the
                vocabulary. The message names the request or the line.
        """
        if (sessions := self.agent_sessions) is not None:
            concurrency = self.max_concurrency or sessions.num_sessions
            sessions = replace(sessions, concurrency=concurrency, max_model_len=max_model_len or sessions.max_model_len)
            workload = redraw_tokens(sessions.requests(self.seed, vocab_size), self.seed, token_round, vocab_size)
        elif self.trace is None:
            workload = make_workload(
                self.seed,
                self.num_prompts or DEFAULT_NUM_PROMPTS,
                parse_lengths(self.input_len or DEFAULT_INPUT_LEN),
                parse_lengths(self.output_len or DEFAULT_OUTPUT_LEN),
                ArrivalProcess(self.request_rate, self.burstiness),
                vocab_size,
                token_round=token_round,
            )
        else:
            workload = self._recorded(self.trace, vocab_size, token_round, tokenize)
        given = {"max_tokens": self.max_tokens, "slo": self.goodput}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return [replace(item, **changes) for item in workload] if changes else workload

    def _recorded(
        self, trace: Path, vocab_size: int, token_round: int, tokenize: Tokenize | None
    ) -> list[WorkloadRequest]:
        options = TraceOptions(
            limit=self.num_prompts, vocab_size=vocab_size, tokenize=tokenize, closed_loop=self.closed_loop
        )
        workload = read_trace(trace, options)
        if self.request_rate is not None:
            arrivals = ArrivalProcess(self.request_rate, self.burstiness)
            workload = with_arrivals(workload, arrivals, np.random.default_rng(self.seed))
        return redraw_tokens(workload, self.seed, token_round, vocab_size)


def text_tokenizer(model: str | None) -> Tokenize:
    """The tokenizer of a model, without special tokens. It is loaded when it is first called.

    Args:
        model: as in `EngineConfig`.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded (when it is first called).
    """

    @cache
    def encode() -> Callable[..., list[int]]:
        from chairlift.loading.resolve import resolve_model

        return resolve_model(model).tokenizer().encode

    return lambda text: encode()(text, add_special_tokens=False)


def redraw_tokens(
    workload: Sequence[WorkloadRequest], seed: int, token_round: int, vocab_size: int
) -> list[WorkloadRequest]:
    """Replace the tokens of all prompts by a random permutation of the vocabulary.

    Requests share the same prefixes as before; rounds share none. Prompts of type `bytes` keep the type, which keeps a
    long trace small.

    Raises:
        ConfigError: a token outside 0..vocab_size - 1.
    """
    rng = np.random.default_rng([seed, 1 + token_round])
    permutation = rng.permutation(vocab_size)
    byte_permutation = bytes(rng.permutation(256).tolist())
    redrawn: list[WorkloadRequest] = []
    for item in workload:
        tokens = item.prompt_token_ids
        if isinstance(tokens, bytes) and vocab_size >= 256:
            redrawn.append(replace(item, prompt_token_ids=tokens.translate(byte_permutation)))
            continue
        ids = np.asarray(list(tokens), dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ConfigError(
                f"workload request {item.request_id!r} has token id {ids.max()}, outside the vocabulary of "
                f"vocab_size={vocab_size}"
            )
        redrawn.append(replace(item, prompt_token_ids=permutation[ids].tolist()))
    return redrawn


def format_arrivals(options: WorkloadOptions) -> str:
    """When the requests of a workload arrive, for a title."""
    if options.agent_sessions is not None:
        text = "as turns of sessions"
    elif options.request_rate is not None:
        text = "at once" if options.request_rate == math.inf else f"at {options.request_rate:g}/s"
    elif options.trace is None:
        text = "at once"
    else:
        text = "after the gaps of the trace" if options.closed_loop else "at the times of the trace"
    return text if options.max_concurrency is None else f"{text}, at most {options.max_concurrency} concurrent"


def format_lengths(options: WorkloadOptions) -> str:
    """The lengths of the requests of a workload and its seed, for a caption."""
    if (sessions := options.agent_sessions) is not None:
        lengths = f"{sessions.num_sessions} agent sessions of {sessions.turns} turns, lengths times {sessions.scale:g}"
    elif options.trace is not None:
        lengths = f"trace {options.trace}"
    else:
        lengths = f"prompt {options.input_len}, output {options.output_len}"
    declared = "" if options.max_tokens is None else f", max_tokens {options.max_tokens}"
    return f"{lengths}{declared}, seed {options.seed}"
