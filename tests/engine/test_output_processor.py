"""The answer of a request does not depend on how its tokens are divided into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.output_processor import AnswerBuilder, OutputProcessor
from chairlift.outputs import EngineCoreOutput, Logprob, RequestOutput, TokenLogprobs
from chairlift.sampling_params import SamplingParams
from chairlift.structured_outputs import Reasoning
from support.case_loop import loop_over


class Letters:
    """One token for each letter."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


def answer(tokens: list[int], sizes: list[int], params: SamplingParams, reason: str) -> RequestOutput:
    """The answer to a request whose outputs have these numbers of tokens; the last one has the rest."""
    processor, builder = OutputProcessor(Letters()), AnswerBuilder()
    processor.add("user", None, [EngineRequest("core", [0], params, 30, frozenset(), 0, 0.0)])
    position = 0
    while position < len(tokens):
        end = position + (sizes.pop(0) if sizes else len(tokens))
        new = tokens[position:end]
        position = end
        logprobs = [TokenLogprobs(Logprob(token, -0.5 * token, 1), []) for token in new]
        is_last = position >= len(tokens)
        output = EngineCoreOutput("core", new, reason if is_last else None, logprobs=logprobs)
        updates, stopped = processor.process([output], 1.0)
        for _, update in updates:
            assert isinstance(update, RequestOutput)
            builder.add(update)
        assert not stopped or not is_last
        if stopped:
            break
    return builder.build()


FORMS = [
    None,
    Reasoning("a", "b"),
    Reasoning("ab", "ca", is_inside=True),
    Reasoning("a", "cc", answer="b", ends=("bb",)),
]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    options=st.fixed_dictionaries(
        {
            "include_stop_str_in_output": st.booleans(),
            "min_tokens": st.integers(0, 6),
            "reasoning": st.sampled_from(FORMS),
        }
    ),
    reason=st.sampled_from(["stop", "length"]),
)
@example([0, 1, 2, 0], [4], ["b"], {}, "length")
@settings(max_examples=200, deadline=None)
def test_answers_do_not_depend_on_the_size_of_outputs(
    tokens: list[int], sizes: list[int], stop: list[str], options: dict[str, Any], reason: str
) -> None:
    params = SamplingParams(max_tokens=30, stop=stop, logprobs=0, **options)
    assert answer(tokens, sizes, params, reason) == answer(tokens, [1] * len(tokens), params, reason)


@loop_over(
    ("text", "form", "options", "expected"),
    [
        ("axbxcxd", Reasoning("a", "c"), {}, "axbxc"),
        ("xbxcxd", Reasoning("a", "c", is_inside=True), {}, "xbxc"),
        ("bxcxd", Reasoning("a", "c"), {}, "b"),
        ("axbx", Reasoning("a", "c"), {}, "axbx"),
        ("axcyxz", Reasoning("a", "c", answer="yx"), {}, "axcyxz"),
        ("axcyxzx", Reasoning("a", "c", answer="yx"), {"include_stop_str_in_output": True}, "axcyxzx"),
        ("axdxb", Reasoning("a", "c", ends=("d",)), {}, "axd"),
        ("axcbxbbx", Reasoning("a", "c"), {"min_tokens": 3}, "axcbxbb"),
        ("xbxbx", None, {"min_tokens": 3}, "xb"),
    ],
)
def test_stop_strings_and_min_tokens_act_after_the_reasoning(
    text: str, form: Reasoning | None, options: dict[str, Any], expected: str
) -> None:
    params = SamplingParams(max_tokens=30, stop=["x"], reasoning=form, **options)
    tokens = [ord(letter) - ord("a") for letter in text]
    for sizes in ([1] * len(tokens), [len(tokens)], [2] * len(tokens)):
        (found,) = answer(tokens, sizes, params, "length").outputs
        assert found.text == expected
        is_stopped = len(expected) < len(text) or "include_stop_str_in_output" in options
        assert (found.finish_reason, found.stop_reason) == (("stop", "x") if is_stopped else ("length", None))
