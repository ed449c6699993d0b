"""Runs requests together and alone on one loaded model, and records the logits that their tokens are sampled from."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from chairlift.clock import VirtualClock
from chairlift.core.speculation.prompt_lookup import Proposal
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import LoadedModel
from chairlift.events import EventList, Step
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.native_set import NativeKernelSet
from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.sampling import IntArray, SamplingParameters, TokenSampler
from chairlift.outputs import EngineCoreOutput, TokenLogprobs
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.worker.random_stream import stream_key
from support.fakes import Propose

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalised": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 2.5, 17: -3.0},
        "logprobs": 3,
    },
    "prompt logprobs": {"temperature": 0, "logprobs": 20, "prompt_logprobs": 20},
}


@dataclass(frozen=True)
class RequestSpec:
    """The parameters of a request.

    Attributes:
        stream: prompts of the same stream have their common prefix as long as the shorter one.
        own: number of tokens at the end of the prompt that no other request has.
        sampling: a key of SAMPLING.
        arrival: number of steps before the request is added.
        abort_after: number of steps from its arrival until it is aborted.
    """

    prompt_len: int
    max_tokens: int
    stream: int = 0
    own: int = 0
    sampling: str = "greedy"
    arrival: int = 0
    abort_after: int | None = None

    @property
    def num_slots(self) -> int:
        return self.prompt_len + self.max_tokens

    @property
    def as_single(self) -> RequestSpec:
        return replace(self, arrival=0, abort_after=None)

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(self.as_single).encode())

    def prompt(self, vocab_size: int) -> list[int]:
        common, own = random.Random(self.stream), random.Random(self.seed)
        num_own = min(self.own, self.prompt_len)
        tokens = [common.randrange(vocab_size) for _ in range(self.prompt_len - num_own)]
        return tokens + [own.randrange(vocab_size) for _ in range(num_own)]

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, seed=self.seed, **SAMPLING[self.sampling])


@dataclass
class Answer:
    """The output of a request: tokens, the logits that each was sampled from, and logprobs, by position."""

    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def add(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            first, entries = output.prompt_logprobs
            for position, entry in enumerate(entries, first):
                assert self.prompt_logprobs.setdefault(position, entry) == entry, "computed again after a preemption"

    def first_difference(self, other: Answer) -> str | None:
        """The first difference from a complete answer, in words; None if there is none. This answer may be shorter."""
        for position, (ours, theirs) in enumerate(zip(self.logits, other.logits, strict=False)):
            if ours != theirs:
                pair = [torch.frombuffer(bytearray(row), dtype=torch.float32) for row in (ours, theirs)]
                num, largest = int((pair[0] != pair[1]).sum()), float((pair[0] - pair[1]).abs().max())
                return f"output token {position}: {num} of {len(pair[0])} logits differ, by up to {largest:g}"
        for name in ("tokens", "logprobs"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs[: len(ours)]:
                return f"{name}: {ours} and {theirs}"
        if not self.prompt_logprobs.items() <= other.prompt_logprobs.items():
            return f"prompt logprobs: {self.prompt_logprobs} and {other.prompt_logprobs}"
        return None


class RecordingSampling(NativeSampling):
    """The native sampling, which records all logits by random stream and position; each request has its own seed."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[tuple[int, int], bytes] = {}

    def make_sampler(self, parameters: SamplingParameters) -> TokenSampler:
        choose = super().make_sampler(parameters)

        def record_and_choose(logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
            for row, values in zip(rows.tolist(), logits, strict=True):
                key = int(parameters.keys[row]), int(parameters.positions[row])
                found = values.numpy().tobytes()
                assert self.logits.setdefault(key, found) == found, "the same request twice"
            return choose(logits, rows)

        return record_and_choose


@dataclass
class RequestRunner:
    """Runs requests on one model, each time with KV memory that contains NaN in all slots that were not written."""

    loaded: LoadedModel
    counts: Counter[str] = field(default_factory=Counter)
    _alone: dict[tuple[str, RequestSpec], Answer] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.loaded.config.vocab_size

    def run_alone(self, request: RequestSpec) -> Answer:
        """The answer of a request that runs alone, with one thread and large chunks, on the current instruction set. No
        block that left a sliding window is released."""
        key = load().isa(), request.as_single
        if key not in self._alone:
            load().set_num_threads(1)
            load().set_tile_order(0)
            (self._alone[key],) = self.run(
                [request.as_single],
                block_size=-(-request.num_slots // 64),
                max_num_batched_tokens=4096,
                enable_prefix_caching=False,
                disable_hybrid_kv_cache_manager=True,
                num_kv_blocks=64,
            )
        return self._alone[key]

    def run_together(self, requests: Sequence[RequestSpec], **options: Any) -> list[Answer]:
        """The answers of requests that run together; `counts` counts preemptions, padding, chunks and prefix hits."""
        events = EventList()
        answers = self.run(requests, events, **options)
        steps = [event for event in events.events if isinstance(event, Step)]
        self.counts["preemptions"] += sum(len(step.preempted) for step in steps)
        self.counts["padding"] += sum(sum(step.num_padding) for step in steps)
        chunks = [n for step in steps for n, c in zip(step.num_scheduled, step.num_computed, strict=True) if n > 1 < c]
        self.counts["chunks"] += len(chunks)
        accepted = sum(step.num_accepted for step in steps)
        self.counts["accepted drafts"] += accepted
        self.counts["rejected drafts"] += sum(map(sum, (step.num_draft for step in steps))) - accepted
        return answers

    def run(self, requests: Sequence[RequestSpec], events: EventList | None = None, **options: Any) -> list[Answer]:
        """The answers of requests; with `speculative_config` all draft tokens are verified, whether they pay or not."""
        sampling = RecordingSampling()
        config = replace(self.loaded.engine_config, **options)
        proposals = self._proposals(requests) if config.speculative else None
        with (
            patch.object(NativeKernelSet, "make_sampling", lambda _set: sampling),
            patch.object(decoder_engine, "measured_row_time", lambda *_: None),
        ):
            engine = build_engine(config, loaded=self.loaded, clock=VirtualClock(), events=events)
        _poison(self.loaded)
        if proposals is not None:
            drafts = engine.core.scheduler._drafts
            assert drafts is not None
            drafts._propose = proposals  # type: ignore[method-assign]
        answers = self._serve(engine, requests)
        for request, answer in zip(requests, answers, strict=True):
            key = int(stream_key(request.seed))
            answer.logits = [sampling.logits[key, request.prompt_len + i] for i in range(len(answer.tokens))]
        return answers

    def _proposals(self, requests: Sequence[RequestSpec]) -> Propose:
        """Proposals from the answers of the requests when they run alone, in which a token in four is wrong."""
        isa, threads = load().isa(), load().num_threads()
        known = {r.seed: r.prompt(self.vocab_size) + self.run_alone(r).tokens for r in requests}
        load().set_isa(isa)
        load().set_num_threads(threads)
        rng = random.Random(0)

        def propose(request: Request, max_tokens: int) -> Proposal | None:
            start = len(request.token_ids)
            tokens = known[request.seed][start : start + min(max_tokens, rng.randint(0, 6))]
            tokens = [token if rng.random() < 0.75 else (token + 1) % self.vocab_size for token in tokens]
            return Proposal(tokens, 2) if tokens else None

        return propose

    def _serve(self, engine: Engine, requests: Sequence[RequestSpec]) -> list[Answer]:
        core = engine.core
        answers = {index: Answer() for index in range(len(requests))}
        waiting = sorted(answers, key=lambda index: requests[index].arrival)
        index_of: dict[str, int] = {}
        abort_steps: dict[str, int] = {}
        step = 0
        while waiting or core.has_work:
            while waiting and (requests[waiting[0]].arrival <= step or not core.has_work):
                index = waiting.pop(0)
                request = requests[index]
                (made,) = engine.input_processor.make(
                    f"r{index}", request.prompt(self.vocab_size), request.params(), arrival_time=0.0
                )
                core.add(made.to_request())
                index_of[made.request_id] = index
                if request.abort_after is not None:
                    abort_steps[made.request_id] = step + request.abort_after
            for request_id in [request_id for request_id, at in abort_steps.items() if at <= step]:
                del abort_steps[request_id]
                self.counts["aborts"] += core.abort(request_id)
            for output in core.step():
                answers[index_of[output.request_id]].add(output)
                self.counts["prefix hits"] += output.num_cached_tokens > 0
            step += 1
        assert core.scheduler.is_idle
        return list(answers.values())


def _poison(loaded: LoadedModel) -> None:
    """Fill KV memory with NaN: slots that were not written must not be read, not even with weight 0."""
    for layer in loaded.model.attention_layers.values():
        assert layer.kv_cache is not None
        for tensor in layer.kv_cache:
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 127)
