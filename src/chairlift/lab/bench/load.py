"""The load that the benchmarks share: which requests, how long, when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import arrival_process, with_arrivals
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.lab.workload.traces import TraceOptions, read_trace

Tokenize = Callable[[str], Sequence[int]]

DEFAULT_NUM_PROMPTS = 64
DEFAULT_PROMPT_LEN = "lognormal:96,0.7,16..512"
DEFAULT_OUTPUT_LEN = "exp:96,8..384"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """A synthetic load or, with `trace`, a recorded one.

    Attributes:
        num_prompts: requests; of a trace the first ones, all if None.
        seed: of lengths, tokens and arrivals.
        prompt_len, output_len: distributions, as `chairlift.lab.workload.lengths` writes them; a trace has its own.
        max_tokens: output tokens that every request declares; its true length, or what the trace says, if None.
        request_rate: arrivals a second; inf: all at once; None: all at once, or when the trace says.
        burstiness: shape of the gaps, 1 is Poisson.
        max_concurrency: requests that are out at once, at most.
        trace: a file that `chairlift.lab.workload.traces` reads.

    Raises:
        ConfigError: naming the option, the value and the limit.
    """

    num_prompts: int | None = None
    seed: int = 0
    prompt_len: str | None = None
    output_len: str | None = None
    max_tokens: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        if self.trace is None:
            for name, default in (
                ("num_prompts", DEFAULT_NUM_PROMPTS),
                ("prompt_len", DEFAULT_PROMPT_LEN),
                ("output_len", DEFAULT_OUTPUT_LEN),
            ):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
        for name in ("prompt_len", "output_len"):
            if (text := getattr(self, name)) is None:
                continue
            if self.trace is not None:
                raise ConfigError(f"{name}={text} is for a synthetic load, and a trace has lengths: give one of them")
            parse_lengths(text)
        for name, low in (("num_prompts", 1), ("seed", 0), ("max_tokens", 1), ("max_concurrency", 1)):
            at_least(name, getattr(self, name), low)
        arrival_process(self.request_rate, self.burstiness)

    def workload(self, vocab_size: int, token_round: int, tokenize: Tokenize | None = None) -> list[WorkloadRequest]:
        """The requests of one round; the rounds differ in their tokens alone.

        Args:
            tokenize: token ids of a text, for a trace that holds texts.

        Raises:
            ConfigError: max_tokens is less than an output length, or the trace cannot be read or does not fit the
                vocabulary; says which request or line.
        """
        if self.trace is None:
            workload = self._synthetic(vocab_size, token_round)
        else:
            workload = self._recorded(self.trace, vocab_size, token_round, tokenize)
        if self.max_tokens is None:
            return workload
        return [replace(item, max_tokens=self.max_tokens) for item in workload]

    def _synthetic(self, vocab_size: int, token_round: int) -> list[WorkloadRequest]:
        assert self.num_prompts is not None
        assert self.prompt_len is not None
        assert self.output_len is not None
        return make_workload(
            self.seed,
            self.num_prompts,
            parse_lengths(self.prompt_len),
            parse_lengths(self.output_len),
            arrival_process(self.request_rate, self.burstiness),
            vocab_size,
            token_round=token_round,
        )

    def _recorded(
        self, trace: Path, vocab_size: int, token_round: int, tokenize: Tokenize | None
    ) -> list[WorkloadRequest]:
        options = TraceOptions(limit=self.num_prompts, vocab_size=vocab_size, tokenize=tokenize)
        workload = read_trace(trace, options=options)
        if self.request_rate is not None:
            arrivals = arrival_process(self.request_rate, self.burstiness)
            workload = with_arrivals(workload, arrivals, np.random.default_rng(self.seed))
        return redraw_tokens(workload, self.seed, token_round, vocab_size)


def text_tokenizer(model: str | None) -> Tokenize:
    """The tokenizer of a model (see `EngineConfig.model`), loaded when it is first called; without special tokens.

    Raises:
        ModelLoadError: when called, if it cannot be had.
    """

    @cache
    def encode() -> Callable[..., list[int]]:
        from chairlift.loading.resolve import load_tokenizer, resolve_model

        return load_tokenizer(resolve_model(model)).encode

    return lambda text: encode()(text, add_special_tokens=False)


def at_least(name: str, value: int | None, low: int) -> None:
    """Raises ConfigError if there is a value and it is less than `low`."""
    if value is not None and value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def first_requests(workload: Sequence[WorkloadRequest], count: int | None) -> list[WorkloadRequest]:
    """The first `count` requests (all if None) whose predecessors are among them."""
    kept: dict[str, WorkloadRequest] = {}
    for item in workload:
        if len(kept) == count:
            break
        if item.after is None or item.after in kept:
            kept[item.request_id] = item
    return list(kept.values())


def redraw_tokens(
    workload: Sequence[WorkloadRequest], seed: int, token_round: int, vocab_size: int
) -> list[WorkloadRequest]:
    """The same requests under other tokens: each token is replaced by another one, everywhere the same, so requests
    share the prefixes that they shared before, and rounds share none. `bytes` stay bytes: a long trace stays small.

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
                f"workload request {item.request_id!r} holds token id {ids.max()}, outside the vocabulary of "
                f"vocab_size={vocab_size}"
            )
        redrawn.append(replace(item, prompt_token_ids=permutation[ids].tolist()))
    return redrawn
