"""Buffered outputs are joined without loss: tokens, and both kinds of logprobs."""

from __future__ import annotations

from chairlift.core.baselines.buffered_outputs import BufferedOutputs
from chairlift.outputs import EngineCoreOutput, Logprob, TokenLogprobs


def logprobs(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(Logprob(token_id, -1.0, 1), []) for token_id in token_ids]


def test_parts_are_joined_in_order_and_by_request() -> None:
    buffer = BufferedOutputs()
    buffer.add([EngineCoreOutput("a", [1], num_cached_tokens=4), EngineCoreOutput("b", [7])])
    buffer.add([EngineCoreOutput("a", [2, 3])])
    assert buffer.take("a") == EngineCoreOutput("a", [1, 2, 3], num_cached_tokens=4)
    assert buffer.take("b") == EngineCoreOutput("b", [7])
    assert buffer.take("a") == EngineCoreOutput("a", []), "the outputs have been taken"


def test_a_chunk_without_a_token_loses_no_logprobs_of_later_tokens() -> None:
    buffer = BufferedOutputs()
    buffer.add([EngineCoreOutput("a", [], prompt_logprobs=(1, logprobs(11, 12)))])
    buffer.add([EngineCoreOutput("a", [5], logprobs=logprobs(5), prompt_logprobs=(3, logprobs(13)))])
    buffer.add([EngineCoreOutput("a", [6], logprobs=logprobs(6))])
    assert buffer.take("a") == EngineCoreOutput(
        "a", [5, 6], logprobs=logprobs(5, 6), prompt_logprobs=(1, logprobs(11, 12, 13))
    )
