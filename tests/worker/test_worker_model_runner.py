from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_fakes import FakeModel, new_request, reference_sample

from chairlift.outputs import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs
from chairlift.sampling_params import SamplingParams
from chairlift.worker import prompt_logprobs
from chairlift.worker.draft_model import DraftModel
from chairlift.worker.model_runner import ModelRunner
from chairlift.worker.pending_step import PendingStep
from chairlift.worker.prompt_logprobs import PromptLogprobs
from chairlift.worker.request_rows import IntArray, RequestRows
from chairlift.worker.sampler import SampledTokens, Sampler

VOCAB = 32
MAX_SEQS = 4
MAX_MODEL_LEN = 40


@functools.cache
def _model() -> FakeModel:
    return FakeModel(VOCAB, num_slots=256)


def _runner(model: FakeModel, block_size: int, draft_model: FakeModel | None = None) -> ModelRunner:
    rows = RequestRows(MAX_SEQS, MAX_MODEL_LEN, block_size, torch.device("cpu"))
    sampler = Sampler.of_rows(rows, VOCAB)
    proposer = None if draft_model is None else DraftModel(draft_model, sampler.choose, rows)
    return ModelRunner(model, rows, sampler, [PromptLogprobs(model, rows, sampler)], proposer)


def _naive_tokens(model: FakeModel, request: NewRequest, num_tokens: int) -> list[int]:
    """The sequence of a request with `num_tokens` tokens, recomputed for every token."""
    tokens = list(request.token_ids)
    while len(tokens) < num_tokens:
        tokens.append(reference_sample(replace(request, token_ids=tokens), model.logits_of(tokens)[-1].numpy()))
    return tokens


@dataclass
class _Live:
    """A request of the random driver.

    `num_tokens` includes sampled tokens whose value is not read yet. `num_read` counts the tokens that the draft model
    has read, without those that were rejected.
    """

    request: NewRequest
    num_tokens: int
    length: int
    num_computed: int = 0
    num_read: int = 0
    num_proposed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.request.token_ids) >= self.length


class _RandomDriver:
    """Schedules random requests, chunks, preemptions and batch orders, and reads results `lag` steps late.

    Without a lag, decoding requests have random draft tokens, of which a part is right, or those of a draft model.
    """

    def __init__(
        self,
        model: FakeModel,
        requests: list[_Live],
        block_size: int,
        lag: int,
        rng: random.Random,
        draft_model: FakeModel | None = None,
    ) -> None:
        self.requests = {live.request.request_id: live for live in requests}
        self.model = model
        self.runner = _runner(model, block_size, draft_model)
        self.has_draft_model = draft_model is not None
        self.num_drafts = self.num_accepted = 0
        self.block_size = block_size
        self.lag = lag
        self.rng = rng
        self.waiting = list(requests)
        self.running: list[_Live] = []
        self.free_blocks = list(range(MAX_SEQS * -(-MAX_MODEL_LEN // block_size)))
        rng.shuffle(self.free_blocks)
        self.pending: list[PendingStep] = []
        self.step = 0

    def run(self) -> None:
        while self.waiting or self.running:
            self.pending.append(self.runner.submit(self._schedule()))
            while len(self.pending) > self.lag:
                self._update(self.runner.result(self.pending.pop(0)))
            assert self.step < 2000, "the driver makes progress"
        for pending in self.pending:
            self._update(self.runner.result(pending))

    def _schedule(self) -> SchedulerOutput:
        output = SchedulerOutput(self.step, {})
        self.step += 1
        for live in [live for live in self.running if live.is_done or self.rng.random() < 0.08]:
            self._remove(live, output)
        for live in [live for live in self.running if self.rng.random() < 0.8]:
            self._extend(live, output)
        self.rng.shuffle(self.waiting)
        for live in list(self.waiting):
            knows_all = live.num_tokens == len(live.request.token_ids)
            if len(self.running) < MAX_SEQS and knows_all and self.rng.random() < 0.6:
                self._introduce(live, output)
        order = list(output.num_scheduled_tokens.items())
        self.rng.shuffle(order)
        return replace(output, num_scheduled_tokens=dict(order))

    def _remove(self, live: _Live, output: SchedulerOutput) -> None:
        self.running.remove(live)
        self.free_blocks += live.blocks
        self.rng.shuffle(self.free_blocks)
        live.blocks, live.num_computed = [], 0
        output.removed.append(live.request.request_id)
        if not live.is_done:
            self.waiting.append(live)

    def _take(self, live: _Live, count: int) -> list[int]:
        missing = -(-(live.num_computed + count) // self.block_size) - len(live.blocks)
        taken = [self.free_blocks.pop() for _ in range(missing)]
        live.blocks += taken
        return taken

    def _extend(self, live: _Live, output: SchedulerOutput) -> None:
        lacking = live.num_tokens - live.num_computed
        if not lacking or live.num_tokens >= MAX_MODEL_LEN:
            return
        count = self.rng.randint(1, lacking)
        num_drafts = min(self.rng.randint(0, 5), MAX_MODEL_LEN - live.num_tokens - 2)
        if lacking > 1 or self.lag or num_drafts < 0:
            num_drafts = 0
        taken = self._take(live, count + num_drafts)
        if taken:
            output.new_block_ids[live.request.request_id] = [taken]
        if self.has_draft_model and live.num_read < len(live.request.token_ids) - 1 and self.rng.random() < 0.5:
            output.num_draft_reads[live.request.request_id] = 1
            live.num_read += 1
        self._advance(live, count, output)
        if num_drafts:
            self._add_drafts(live, num_drafts, output)

    def _add_drafts(self, live: _Live, count: int, output: SchedulerOutput) -> None:
        request_id = live.request.request_id
        output.num_scheduled_tokens[request_id] += count
        self.num_drafts += count
        if self.has_draft_model:
            output.num_draft_tokens[request_id] = count
            live.num_read, live.num_proposed = len(live.request.token_ids) - 1, count
            return
        known = len(live.request.token_ids)
        right = _naive_tokens(self.model, live.request, known + count)[known:]
        wrong = [(token + 1) % VOCAB for token in right]
        drafts = [pair[self.rng.random() < 0.3] for pair in zip(right, wrong, strict=True)]
        output.draft_token_ids[request_id] = drafts

    def _introduce(self, live: _Live, output: SchedulerOutput) -> None:
        self.waiting.remove(live)
        self.running.append(live)
        count = self.rng.randint(1, live.num_tokens)
        live.num_read = 0
        self._take(live, count)
        tokens = list(live.request.token_ids)
        output.new_requests.append(replace(live.request, token_ids=tokens, block_ids=[list(live.blocks)]))
        self._advance(live, count, output)

    def _advance(self, live: _Live, count: int, output: SchedulerOutput) -> None:
        output.num_scheduled_tokens[live.request.request_id] = count
        live.num_computed += count
        live.num_tokens += live.num_computed == live.num_tokens

    def _update(self, result: ModelRunnerOutput) -> None:
        for request_id, tokens in result.token_ids.items():
            live = self.requests[request_id]
            live.request.token_ids.extend(tokens)
            self.num_accepted += len(tokens) - 1
            live.num_tokens += len(tokens) - 1
            live.num_computed += len(tokens) - 1
            live.num_read += min(live.num_proposed, len(tokens)) if live.num_proposed else 0
            live.num_proposed = 0
            live.logprobs += result.logprobs.get(request_id, [])
            if live.is_done and live in self.waiting:
                self.waiting.remove(live)
        for request_id, (first, entries) in result.prompt_logprobs.items():
            for position, entry in enumerate(entries, first):
                known = self.requests[request_id].prompt_logprobs.setdefault(position, entry)
                assert known == entry, "recomputed after a preemption, a prompt is as likely as before"


def _random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.5]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.7]),
        logit_bias=rng.choice([{}, {3: 2.0}]),
        max_tokens=None,
        min_tokens=rng.choice([0, 6]),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
    )


def _random_requests(rng: random.Random) -> list[_Live]:
    requests = []
    for i in range(rng.randint(1, 8)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        request = new_request(f"r{i}", prompt, _random_params(rng), seed=rng.getrandbits(64), stop=[1, 2, 3])
        requests.append(_Live(request, len(prompt), len(prompt) + rng.randint(1, 14)))
    return requests


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0, 1]), st.sampled_from([1, 4, 16]), st.booleans())
def test_the_tokens_do_not_depend_on_the_schedule(seed: int, lag: int, block_size: int, has_draft_model: bool) -> None:
    rng = random.Random(seed)
    model, draft_model = _model(), FakeModel(VOCAB, num_slots=256) if has_draft_model else None
    model.memory.fill_(-1)
    requests = _random_requests(rng)
    prompts = [replace(live.request, token_ids=list(live.request.token_ids)) for live in requests]
    _RandomDriver(model, requests, block_size, lag, rng, draft_model).run()
    for live, prompt in zip(requests, prompts, strict=True):
        tokens = live.request.token_ids
        assert tokens == _naive_tokens(model, prompt, len(tokens))
        _check_logprobs(model, live)


def test_a_draft_model_with_equal_logits_is_always_right() -> None:
    """It reads the same tokens at the same positions, and draws with the same random numbers."""
    rng = random.Random(5)
    for _ in range(20):
        model, draft_model = FakeModel(VOCAB, num_slots=256), FakeModel(VOCAB, num_slots=256)
        requests = _random_requests(rng)
        for live in requests:
            params = SamplingParams(temperature=rng.choice([0.0, 0.9]), top_k=rng.choice([0, 7]), max_tokens=None)
            live.request = replace(live.request, sampling_params=params)
        driver = _RandomDriver(model, requests, 4, 0, rng, draft_model)
        driver.run()
        assert driver.num_accepted == driver.num_drafts


def test_an_error_after_an_accepted_draft_is_reported_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    runner = _runner(model, 16)
    request = new_request("a", [5, 6, 7], SamplingParams(temperature=0), blocks=[0])
    right = _naive_tokens(model, request, 6)[3:]
    calls: list[int] = []
    sample = runner._sampler.sample

    def failing(logits: torch.Tensor, rows: IntArray) -> SampledTokens:
        calls.append(len(rows))
        return replace(sample(logits, rows), errors={0: "the grammar cannot continue"} if len(calls) > 1 else {})

    monkeypatch.setattr(runner._sampler, "sample", failing)
    first = SchedulerOutput(0, {"a": 5}, [request], draft_token_ids={"a": right[:2]})
    result = runner.result(runner.submit(first))
    assert (result.token_ids, result.errors) == ({"a": right[:1]}, {})
    result = runner.result(runner.submit(SchedulerOutput(1, {"a": 1})))
    assert result.errors == {"a": "the grammar cannot continue"}
    assert calls == [1, 1, 1]


def _check_logprobs(model: FakeModel, live: _Live) -> None:
    params, tokens = live.request.sampling_params, live.request.token_ids
    num_prompt = live.request.num_prompt_tokens
    expected = model.logits_of(tokens).log_softmax(dim=1)
    outputs = dict(enumerate(live.logprobs, num_prompt))
    assert sorted(outputs) == ([] if params.logprobs is None else list(range(num_prompt, len(tokens))))
    assert sorted(live.prompt_logprobs) == ([] if params.prompt_logprobs is None else list(range(1, num_prompt)))
    for entries, wanted in ((outputs, params.logprobs), (live.prompt_logprobs, params.prompt_logprobs)):
        for position, entry in entries.items():
            row = expected[position - 1]
            order = row.argsort(descending=True).tolist()
            assert entry.token.token_id == tokens[position]
            assert entry.token.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-5)
            assert entry.token.rank == order.index(tokens[position]) + 1
            assert [top.token_id for top in entry.top] == order[:wanted]


def test_prompt_logprobs_keep_few_rows_of_logits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "PROMPT_LOGPROB_ROWS", 5)
    sizes: list[int] = []

    class Counting(FakeModel):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            sizes.append(len(hidden))
            return super().logits(hidden)

    model = Counting(VOCAB, num_slots=256)
    runner = _runner(model, 4)
    requests = [
        new_request(f"r{i}", range(1 + i, 14 + i), SamplingParams(prompt_logprobs=i), blocks=range(8 * i, 8 * i + 4))
        for i in range(2)
    ]
    counts = {"r0": 13, "r1": 7}
    result = runner.result(runner.submit(SchedulerOutput(0, counts, new_requests=requests)))
    assert sizes == [5, 5, 5, 4, 1]
    assert {k: (first, len(entries)) for k, (first, entries) in result.prompt_logprobs.items()} == {
        "r0": (1, 12),
        "r1": (1, 7),
    }
    assert list(result.token_ids) == ["r0"]
    for i, request in enumerate(requests):
        expected = model.logits_of(request.token_ids).log_softmax(dim=1)
        for position, entry in enumerate(result.prompt_logprobs[f"r{i}"][1], 1):
            assert entry.token.logprob == pytest.approx(float(expected[position - 1, request.token_ids[position]]))
            assert len(entry.top) == i


def test_a_chunk_that_does_not_sample_skips_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    runner = _runner(model, 4)
    monkeypatch.setattr(model, "logits", lambda hidden: pytest.fail("no request samples"))
    request = new_request("a", range(8), blocks=[0, 1])
    result = runner.result(runner.submit(SchedulerOutput(0, {"a": 7}, new_requests=[request])))
    assert result == ModelRunnerOutput(0, {})


def test_the_head_computes_the_last_rows_of_requests_that_sample_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    runner = _runner(model, 4)
    computed: list[torch.Tensor] = []
    forward, logits = model.forward, model.logits
    hidden: list[torch.Tensor] = []
    monkeypatch.setattr(model, "forward", lambda *inputs: hidden.append(forward(*inputs)) or hidden[-1])
    monkeypatch.setattr(model, "logits", lambda rows: computed.append(rows) or logits(rows))
    requests = [
        new_request("whole", range(3), blocks=[0]),
        new_request("chunk", range(8), blocks=[1, 2]),
        new_request("other", range(2), blocks=[3]),
    ]
    scheduled = {"whole": 3, "chunk": 7, "other": 2}
    result = runner.result(runner.submit(SchedulerOutput(0, scheduled, new_requests=requests)))
    assert set(result.token_ids) == {"whole", "other"}
    assert torch.equal(computed[0], hidden[0][[2, 11]]), "of 12 rows"


def test_the_logits_of_a_padded_row_are_computed_and_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    runner = _runner(model, 4)
    rows: list[int] = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    requests = [new_request(name, [1, 2], blocks=[block]) for block, name in enumerate(("done", "goes on"))]
    runner.submit(SchedulerOutput(0, {"done": 2, "goes on": 2}, new_requests=requests))
    mixed = SchedulerOutput(1, {"done": 0, "goes on": 1}, num_padding_tokens={"done": 1})
    assert list(runner.result(runner.submit(mixed)).token_ids) == ["goes on"]
    alone = SchedulerOutput(2, {"done": 0, "goes on": 0}, num_padding_tokens={"done": 1, "goes on": 1})
    assert runner.result(runner.submit(alone)) == ModelRunnerOutput(2, {})
    assert rows == [2, 2, 2]


def test_a_step_without_tokens_removes_requests() -> None:
    runner = _runner(_model(), 4)
    for step in range(2 * MAX_SEQS):
        request = new_request(f"r{step}", [1, 2], blocks=[step])
        assert runner.result(
            runner.submit(SchedulerOutput(2 * step, {f"r{step}": 2}, new_requests=[request]))
        ).token_ids
        removal = SchedulerOutput(2 * step + 1, {}, removed=[f"r{step}"])
        assert runner.result(runner.submit(removal)) == ModelRunnerOutput(2 * step + 1, {})


def test_a_cached_prefix_is_read_and_not_recomputed() -> None:
    model = _model()
    runner = _runner(model, 4)
    params = SamplingParams(temperature=0)
    first = new_request("first", range(10), params, blocks=[3, 9, 5])
    runner.result(runner.submit(SchedulerOutput(0, {"first": 10}, new_requests=[first])))
    tokens = [*range(8), 30, 31]
    second = new_request("second", tokens, params, num_computed=8, blocks=[3, 9, 7])
    result = runner.result(runner.submit(SchedulerOutput(1, {"second": 2}, new_requests=[second])))
    assert result.token_ids["second"] == [int(model.logits_of(tokens)[-1].argmax())]


def test_results_are_plain_integers() -> None:
    runner = _runner(_model(), 4)
    result = runner.result(runner.submit(SchedulerOutput(0, {"a": 1}, new_requests=[new_request("a")])))
    assert type(result.token_ids["a"][0]) is int
    assert not torch.is_inference_mode_enabled()
