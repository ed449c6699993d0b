"""The answers to one prompt: what they share, what they cost, and the groups that they form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift import LLM, SamplingParams
from chairlift.engine.input_processor import EngineRequest, InputProcessor
from chairlift.engine.process.commands import Add, Command
from chairlift.engine.sibling_groups import SiblingGroup, SiblingGroups, unfinished_ids
from chairlift.sampling_params import MAX_N
from chairlift.structured_outputs import StructuredOutputs
from support.operations import count_operations

LISTED = list(range(50)) * 1000


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Any) -> Any:
    llm = LLM(model=str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=64, num_threads=1)
    yield llm.engine.input_processor
    llm.close()


def make(processor: InputProcessor, params: SamplingParams, prompt: list[int]) -> list[EngineRequest]:
    return processor.make("call", prompt, params, arrival_time=0.0)


def params_of(n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=2, detokenize=False, stop_token_ids=LISTED, allowed_token_ids=LISTED)


def test_lists_are_made_unique() -> None:
    params = SamplingParams(stop_token_ids=[3, 1, 3], allowed_token_ids=[2, 2])
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3, 1), (2,))


def test_siblings_share_prompt_and_parameters_also_after_the_wire(processor: InputProcessor) -> None:
    sent = Add.from_siblings(make(processor, params_of(MAX_N), [1, 2, 3]))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Command)
    assert isinstance(received, Add)
    for requests in (sent.requests(), received.requests()):
        assert len({request.request_id for request in requests}) == len({each.seed for each in requests}) == MAX_N
        first, second, *_ = requests
        for other in requests[1:]:
            assert other.prompt_token_ids is first.prompt_token_ids
            assert other.sampling_params is second.sampling_params
            assert other.to_request().stop_token_ids is first.stop_token_ids
            assert other.leader_id == first.request_id
    assert received.requests() == sent.requests()


def test_the_size_of_the_message_hardly_depends_on_the_number_of_answers(processor: InputProcessor) -> None:
    single, many = (
        msgspec.msgpack.encode(Add.from_siblings(make(processor, params_of(n), [1] * 200))) for n in (1, MAX_N)
    )
    assert len(many) - len(single) < 64 * MAX_N


def test_work_per_answer_does_not_depend_on_the_lists(processor: InputProcessor) -> None:
    def operations(prompts: int, n: int, params: SamplingParams) -> int:
        return count_operations(lambda: [make(processor, params, [1, 2]) for _ in range(prompts)])

    small, large = SamplingParams(n=MAX_N, max_tokens=2, detokenize=False), params_of(MAX_N)
    assert operations(1, MAX_N, large) < 2 * operations(1, MAX_N, small) + 20 * len(set(LISTED))
    once = operations(1, MAX_N, params_of(MAX_N))
    assert operations(10, MAX_N, params_of(MAX_N)) < 11 * once


def test_only_the_constructor_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], structured_outputs=StructuredOutputs(choice=["b", "c"]))
    message = msgspec.msgpack.encode(params)

    def fail(_record: object) -> None:
        raise AssertionError("a record that was checked is checked again")

    for record in (SamplingParams, StructuredOutputs):
        monkeypatch.setattr(record, "check", fail)
    decoded = msgspec.msgpack.decode(message, type=SamplingParams)
    assert decoded == params
    assert hash(decoded.structured_outputs) == hash(params.structured_outputs)
    with pytest.raises(AssertionError, match="checked again"):
        SamplingParams()


def test_prompt_logprobs_belong_to_the_first_answer_only(processor: InputProcessor) -> None:
    first, *others = make(processor, SamplingParams(n=3, max_tokens=1, detokenize=False, prompt_logprobs=1), [1, 2])
    assert [each.sampling_params.prompt_logprobs for each in (first, *others)] == [1, None, None]


def test_consecutive_prompts_with_one_object_are_resolved_once(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved: list[SamplingParams] = []
    resolve = processor.constraints.resolve
    monkeypatch.setattr(
        processor.constraints, "resolve", lambda params, stop: resolved.append(params) or resolve(params, stop)
    )
    one, other = (SamplingParams(max_tokens=2, detokenize=False) for _ in range(2))
    for params in (one, one, other, one):
        make(processor, params, [1, 2])
    assert resolved == [one, other, one]


REQUEST_IDS = [f"r{index}" for index in range(8)]


class Operations(RuleBasedStateMachine):
    """Applies random operations to SiblingGroups and to a model: the ids of each group, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = SiblingGroups[SiblingGroup[int]]()
        self.added: list[SiblingGroup[int]] = []
        self.ids: list[list[str]] = []

    @rule(request_ids=st.lists(st.sampled_from(REQUEST_IDS), min_size=1, max_size=4, unique=True))
    def add(self, request_ids: list[str]) -> None:
        """Some of the ids may be those of earlier groups, which lose them."""
        group = SiblingGroup(dict.fromkeys(request_ids, len(self.added)))
        self.groups.add(group)
        self.ids = [[one for one in ids if one not in request_ids] for ids in self.ids]
        self.added.append(group)
        self.ids.append(request_ids)

    @rule(request_ids=st.lists(st.sampled_from(REQUEST_IDS)))
    def remove(self, request_ids: list[str]) -> None:
        """Ids may be unknown, or occur twice."""
        left = [[one for one in ids if one not in request_ids] for ids in self.ids]
        ended = [index for index, ids in enumerate(self.ids) if ids and not left[index]]
        found = self.groups.remove(request_ids)
        assert sorted(map(self.added.index, found)) == ended
        self.ids = left

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert list(self.groups) == [group for group, ids in zip(self.added, self.ids, strict=True) if ids]
        assert unfinished_ids(self.groups) == [request_id for ids in self.ids for request_id in ids]
        assert len(self.groups) == sum(map(len, self.ids))
        for index, (group, ids) in enumerate(zip(self.added, self.ids, strict=True)):
            assert group.unfinished == dict.fromkeys(ids, index)
            assert all(self.groups.get(request_id) is group for request_id in ids)
        unknown = set(REQUEST_IDS) - set(unfinished_ids(self.groups))
        assert all(self.groups.get(request_id) is None for request_id in unknown)


TestSiblingGroups = Operations.TestCase
