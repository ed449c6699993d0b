"""CheckingExecutor, which computes no model and checks every step of the scheduler; and helpers to run it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chairlift.clock import VirtualClock
from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.kv_groups import FULL
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.core.kv.stored_prefixes import BlockStore
from chairlift.core.speculation.prompt_lookup import Proposal
from chairlift.events import EventList
from chairlift.outputs import EngineCoreOutput, Logprob, ModelRunnerOutput, NewRequest, SchedulerOutput, TokenLogprobs
from chairlift.policy_class import default_length_predictor
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.slo import SLO
from chairlift.speculative_config import SpeculativeConfig
from chairlift.step_time import RowTime, StepTime

Propose = Callable[[Request, int], Proposal | None]
"""Proposes at most a number of draft tokens for a request."""


def prefix_key(token_ids: Iterable[int]) -> bytes:
    """The content of a slot: a digest of its token and all tokens before it, on which K and V depend as well."""
    return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=8).digest()


def next_token(token_ids: list[int], vocab_size: int = 1000) -> int:
    """The fake model's greedy continuation: a function of the whole prefix."""
    return int.from_bytes(prefix_key(token_ids), "little") % vocab_size


def likely_tokens(token_ids: list[int], count: int = 12, vocab_size: int = 16) -> list[Logprob]:
    """The likely next tokens of the fake model after a prefix, in descending order."""
    key = prefix_key(token_ids)
    digests = {token: hashlib.blake2b(key + bytes([token])).digest() for token in range(vocab_size)}
    scores = {token: -int.from_bytes(digest[:6], "little") / (1 << 46) for token, digest in digests.items()}
    ranked = sorted(scores, key=lambda token: -scores[token])
    return [Logprob(token, scores[token], rank) for rank, token in enumerate(ranked[:count], 1)]


class CheckingExecutor:
    """Mirrors the block tables, and keeps a group of layers and a prefix digest in each slot of the KV memory.

    Every step writes the slots of its chunks, then reads the slots of each scheduled request, as attention does, and
    then writes the slots of requests with one token, as native attention may do. Tokens are sampled from digests, so a
    wrong table leads to an assertion or to wrong tokens.

    A checkpoint is the digest of the tokens whose state was written to it. It is not written in a step that reads it.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        windows: tuple[int | None, ...] = FULL,
        num_checkpoints: int | None = None,
    ) -> None:
        self.num_checkpoints = num_checkpoints
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.windows = windows
        self.memory: dict[int, tuple[int, bytes]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}
        self.outputs: list[SchedulerOutput] = []
        self.checkpoints: dict[int, bytes] = {}
        self.beams: dict[str, int] = {}
        self.swapped: dict[int, list[tuple[int, bytes] | None]] = {}

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert output.step == len(self.outputs)
        self.outputs.append(output)
        num_tokens = sum(output.num_scheduled_tokens.values()) + sum(output.num_padding_tokens.values())
        assert 0 < num_tokens <= self.max_num_batched_tokens
        assert output.num_padding_tokens.keys() <= output.num_scheduled_tokens.keys()
        assert all(count > 0 for count in output.num_padding_tokens.values())
        for request_id in output.removed:
            del self.tokens[request_id], self.tables[request_id], self.computed[request_id]
        self._move_beams(output)
        for new in output.new_requests:
            self._introduce(new)
            assert new.request_id in output.num_scheduled_tokens
        assert len(self.tokens) <= self.max_num_seqs
        self._swap(output)
        for request_id, added in output.new_block_ids.items():
            assert any(added)
            for table, block_ids in zip(self.tables[request_id], added, strict=True):
                table += block_ids
        for request_id, drafts in output.draft_token_ids.items():
            assert 0 < len(drafts) < output.num_scheduled_tokens[request_id]
            self.tokens[request_id] += drafts
        self._check_checkpoints(output)
        scheduled = output.num_scheduled_tokens.items()
        work = [(rid, count) for rid, count in scheduled if count or rid not in output.num_padding_tokens]
        for request_id, count in work:
            if count > 1:
                self._write(request_id, count)
        for request_id, count in work:
            self._check(request_id, count)
        for request_id, count in work:
            if count <= 1:
                self._write(request_id, count)
        token_ids = dict(self._sample(output))
        logprobs = {
            request_id: [
                TokenLogprobs(Logprob(token_ids[request_id][0], 0.0, 1), likely_tokens(self.tokens[request_id][:-1]))
            ]
            for request_id in token_ids.keys() & self.beams.keys()
        }
        return ModelRunnerOutput(output.step, token_ids, logprobs)

    def result(self, handle: ModelRunnerOutput) -> ModelRunnerOutput:
        return handle

    def _move_beams(self, output: SchedulerOutput) -> None:
        before = {request_id: list(self.tokens[request_id]) for request_id in output.beams}
        for request_id, (parent_id, token) in output.beams.items():
            assert len(before[request_id]) == len(before[parent_id])
            assert self.computed[request_id] == self.computed[parent_id]
            self.tokens[request_id] = [*before[parent_id][:-1], token]
            if request_id != parent_id:
                assert output.beams[parent_id][0] == parent_id, "a parent continues itself"
                num_shared = self.computed[parent_id] // self.block_size
                for table, source in zip(self.tables[request_id], self.tables[parent_id], strict=True):
                    table[:num_shared] = source[:num_shared]

    def _swap(self, output: SchedulerOutput) -> None:
        size = self.block_size
        for swap_id, block_id in output.swapped_out.items():
            self.swapped[swap_id] = [self.memory.get(block_id * size + i) for i in range(size)]
        copies = {
            target * size + i: self.memory.get(source * size + i)
            for target, source in output.copied_blocks.items()
            for i in range(size)
        }
        for slot, content in copies.items():
            self.memory.pop(slot, None)
            if content is not None:
                self.memory[slot] = content
        for block_id, swap_id in output.swapped_in.items():
            for i, content in enumerate(self.swapped[swap_id]):
                self.memory.pop(block_id * size + i, None)
                if content is not None:
                    self.memory[block_id * size + i] = content

    def _introduce(self, new: NewRequest) -> None:
        assert new.request_id not in self.tokens
        if new.sampling_params.use_beam_search:
            self.beams[new.request_id] = new.sampling_params.n
        self.tokens[new.request_id] = list(new.token_ids)
        self.tables[new.request_id] = [list(block_ids) for block_ids in new.block_ids]
        assert len(new.block_ids) == len(self.windows)
        self.computed[new.request_id] = new.num_computed_tokens

        assert (new.checkpoint is not None) == (self.num_checkpoints is not None and new.num_computed_tokens > 0)
        if new.checkpoint is not None:
            assert self.checkpoints[new.checkpoint] == prefix_key(new.token_ids[: new.num_computed_tokens])

    def _check_checkpoints(self, output: SchedulerOutput) -> None:
        """Write the checkpoints of the step, which are neither read in it nor written twice."""
        written = [slot for entries in output.checkpoints.values() for _, slot in entries]
        read = {new.checkpoint for new in output.new_requests}
        assert len(written) == len(set(written))
        assert read.isdisjoint(written)
        assert all(0 <= slot < (self.num_checkpoints or 0) for slot in written)
        for request_id, entries in output.checkpoints.items():
            start = self.computed[request_id]
            for position, slot in entries:
                assert start < position <= start + output.num_scheduled_tokens[request_id]
                assert position % self.block_size == 0
                self.checkpoints[slot] = prefix_key(self.tokens[request_id][:position])

    def _slot(self, request_id: str, group: int, position: int) -> int:
        block_id = self.tables[request_id][group][position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id * self.block_size + position % self.block_size

    def _write(self, request_id: str, count: int) -> None:
        start = self.computed[request_id]
        tokens = self.tokens[request_id]
        assert 0 < count <= len(tokens) - start
        for position in range(start, start + count):
            for group in range(len(self.windows)):
                self.memory[self._slot(request_id, group, position)] = group, prefix_key(tokens[: position + 1])
        self.computed[request_id] = start + count

    def _check(self, request_id: str, count: int) -> None:
        """Read what the queries of the step read: `count` tokens, which were written already if there are several."""
        tokens, computed = self.tokens[request_id], self.computed[request_id]
        first_query = computed - count if count > 1 else computed
        for group, window in enumerate(self.windows):
            first_key = 0 if window is None else max(0, first_query - window + 1)
            for position in range(first_key, computed):
                expected = group, prefix_key(tokens[: position + 1])
                found = self.memory.get(self._slot(request_id, group, position))
                assert found == expected, (request_id, group, position)

    def _sample(self, output: SchedulerOutput) -> Iterable[tuple[str, list[int]]]:
        for request_id, count in output.num_scheduled_tokens.items():
            if not count:
                continue
            tokens = self.tokens[request_id]
            if self.computed[request_id] == len(tokens):
                yield request_id, self._verify(request_id, output.draft_token_ids.get(request_id, []))

    def _verify(self, request_id: str, drafts: list[int]) -> list[int]:
        """Sample a token, and one more after each draft token that equals the token sampled before it."""
        tokens = self.tokens[request_id]
        num_known = len(tokens) - len(drafts)
        del tokens[num_known:]
        tokens.append(next_token(tokens))
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(next_token(tokens))
        self.computed[request_id] = len(tokens) - 1
        return tokens[num_known:]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 256,
    scheduling_policy: str = "fcfs",
    length_predictor: str | None = None,
    pacing_tokens_per_second: float | None = None,
    enable_prefix_caching: bool = True,
    steps_ahead: int = 0,
    kv: str = "paged",
    arena: str = "buddy",
    batching: str = "continuous",
    static_batch_size: int = 4,
    static_run_to: str = "batch",
    step_time: StepTime | None = None,
    windows: tuple[int | None, ...] = FULL,
    propose: Propose | None = None,
    row_time: RowTime | None = None,
    enable_chunked_prefill: bool = True,
    block_stores: Sequence[BlockStore] = (),
    checkpoints: CheckpointPlan | None = None,
    num_swap_blocks: int = 0,
) -> tuple[EngineCore, Any, CheckingExecutor, EventList]:
    """An engine with a CheckingExecutor, and its parts. It verifies what `propose` returns, without a prompt lookup."""
    config = SchedulerConfig(
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        scheduling_policy,
        length_predictor=length_predictor or default_length_predictor(scheduling_policy),
        pacing_tokens_per_second=pacing_tokens_per_second,
        batching=batching,
        static_batch_size=min(static_batch_size, max_num_seqs),
        static_run_to=static_run_to,
        step_time=step_time,
        speculative_config=None if propose is None else SpeculativeConfig(num_speculative_tokens=5),
        row_time=row_time,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    limits = (windows, max_num_batched_tokens, checkpoints, num_swap_blocks)
    pool = KVPool(num_blocks, block_size, max_model_len, kv, arena, *limits)
    manager = make_kv_cache_manager(pool, enable_prefix_caching, block_stores)
    num_checkpoints = None if checkpoints is None else checkpoints.num_slots
    executor = CheckingExecutor(block_size, num_blocks, max_num_batched_tokens, max_num_seqs, windows, num_checkpoints)
    events = EventList()
    scheduler = make_scheduler(config, manager, events)
    if propose is not None:
        scheduler._drafts._propose = propose  # type: ignore[union-attr, method-assign]
    core = EngineCore(scheduler, executor, VirtualClock(), steps_ahead)
    return core, manager, executor, events


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    priority: int = 0,
    leader_id: str | None = None,
    stop_token_ids: Iterable[int] = (),
    output_len: int | None = None,
    tenant: str = "",
    cache_salt: str | None = None,
    deadline: float | None = None,
    lora_id: int = 0,
    slo: SLO | None = None,
    is_streamed: bool = True,
) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(temperature=0, max_tokens=max_tokens, slo=slo, is_streamed=is_streamed),
        max_tokens,
        priority=priority,
        leader_id=leader_id,
        stop_token_ids=frozenset(stop_token_ids),
        output_len=output_len,
        tenant=tenant,
        cache_salt=cache_salt,
        deadline=deadline,
        lora_id=lora_id,
    )


def allocate(manager: KVCacheManager, request: Request) -> bool:
    """Give a request its blocks and its progress, as the running batch does; False if memory is short."""
    num_computed = manager.allocate(request)
    if num_computed is None:
        return False
    request.num_computed_tokens = num_computed
    return True


def expected_tokens(prompt: list[int], max_tokens: int, stop_token_ids: Iterable[int] = ()) -> list[int]:
    """The answer of the fake model, computed without an engine."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in set(stop_token_ids):
            break
    return tokens[len(prompt) :]


class PartlyRightProposals:
    """Proposals for the fake model of random length, whose tokens are right with a given probability."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random = random.Random(seed)
        self._probability = probability

    def __call__(self, request: Request, max_tokens: int) -> Proposal | None:
        count = self._random.randint(0, max_tokens)
        tokens = expected_tokens(request.token_ids, count) if count else []
        drafts = [t if self._random.random() < self._probability else (t + 1) % 1000 for t in tokens]
        return Proposal(drafts, self._random.randint(1, 20)) if drafts else None


def collect(outputs: Iterable[EngineCoreOutput], answers: dict[str, list[int]]) -> None:
    for output in outputs:
        answers.setdefault(output.request_id, []).extend(output.new_token_ids)


def run_to_end(core: EngineCore, limit: int = 100_000) -> dict[str, list[int]]:
    """Run steps until no work is left; returns the tokens of each request."""
    answers: dict[str, list[int]] = {}
    for _ in range(limit):
        if not core.has_work:
            return answers
        collect(core.step(), answers)
    raise AssertionError(f"the engine still has work after {limit} steps")
