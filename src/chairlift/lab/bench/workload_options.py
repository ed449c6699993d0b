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
from chairlift.lab.workload.arrivals import ArrivalProcess, with_arrivals
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import MAX_NUM_PROMPTS, WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.lab.workload.traces.formats import TraceOptions
from chairlift.lab.workload.traces.trace_loader import read_trace
from chairlift.options import check_options, option
from chairlift.slo import SLO, parse_slo

Tokenize = Callable[[str], Sequence[int]]

DEFAULT_NUM_PROMPTS = 64
DEFAULT_INPUT_LEN = "lognormal:96,0.7,16..512"
DEFAULT_OUTPUT_LEN = "exp:96,8..384"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Options of a synthetic workload or, with `trace`, of a recorded one.

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
    goodput: SLO | None = option(
        None,
        "SLO of every request in milliseconds, as ttft:100 tpot:50, whose goodput is measured. Default: none.",
        parse=parse_slo,
        is_repeated=True,
        takes_several=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.trace is None:
            for name, default in (
                ("num_prompts", DEFAULT_NUM_PROMPTS),
                ("input_len", DEFAULT_INPUT_LEN),
                ("output_len", DEFAULT_OUTPUT_LEN),
            ):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
        for name in ("input_len", "output_len"):
            if (text := getattr(self, name)) is None:
                continue
            if self.trace is not None:
                raise ConfigError(
                    f"{name}={text} cannot be combined with trace, which determines the lengths: leave one of them out"
                )
            parse_lengths(text)
        ArrivalProcess(self.request_rate, self.burstiness)

    def workload(self, vocab_size: int, token_round: int, tokenize: Tokenize | None = None) -> list[WorkloadRequest]:
        """Create the requests of one round. Rounds differ only in their tokens.

        Args:
            tokenize: converts text to token ids, for a trace with texts.

        Raises:
            ConfigError: max_tokens is less than an output length, or the trace cannot be read or does not fit the
                vocabulary. The message names the request or the line.
        """
        if self.trace is None:
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
        options = TraceOptions(limit=self.num_prompts, vocab_size=vocab_size, tokenize=tokenize)
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
    if options.request_rate is None:
        text = "at once" if options.trace is None else "at the times of the trace"
    else:
        text = "at once" if options.request_rate == math.inf else f"at {options.request_rate:g}/s"
    return text if options.max_concurrency is None else f"{text}, at most {options.max_concurrency} concurrent"


def format_lengths(options: WorkloadOptions) -> str:
    """The lengths of the requests of a workload and its seed, for a caption."""
    if options.trace is not None:
        lengths = f"trace {options.trace}"
    else:
        lengths = f"prompt {options.input_len}, output {options.output_len}"
    declared = "" if options.max_tokens is None else f", max_tokens {options.max_tokens}"
    return f"{lengths}{declared}, seed {options.seed}"
