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


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    options=st.fixed_dictionaries({"include_stop_str_in_output": st.booleans(), "min_tokens": st.integers(0, 6)}),
    reason=st.sampled_from(["stop", "length"]),
)
@example([0, 1, 2, 0], [4], ["b"], {}, "length")
@settings(max_examples=200, deadline=None)
def test_answers_do_not_depend_on_the_size_of_outputs(
    tokens: list[int], sizes: list[int], stop: list[str], options: dict[str, Any], reason: str
) -> None:
    params = SamplingParams(max_tokens=30, stop=stop, logprobs=0, **options)
    assert answer(tokens, sizes, params, reason) == answer(tokens, [1] * len(tokens), params, reason)
