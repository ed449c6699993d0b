"""What a closed batch holds back is told whole: tokens, and both kinds of logprobs."""

from __future__ import annotations

from chairlift.core.held_outputs import HeldOutputs
from chairlift.outputs import EngineCoreOutput, Logprob, TokenLogprobs


def logprobs(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(Logprob(token_id, -1.0, 1), []) for token_id in token_ids]


def test_parts_are_joined_in_order_and_by_request() -> None:
    held = HeldOutputs()
    held.hold([EngineCoreOutput("a", [1], num_cached_tokens=4), EngineCoreOutput("b", [7])])
    held.hold([EngineCoreOutput("a", [2, 3])])
    assert held.release("a") == EngineCoreOutput("a", [1, 2, 3], num_cached_tokens=4)
    assert held.release("b") == EngineCoreOutput("b", [7])
    assert held.release("a") == EngineCoreOutput("a", []), "it was released"


def test_a_chunk_without_a_token_loses_no_logprobs_of_later_tokens() -> None:
    held = HeldOutputs()
    held.hold([EngineCoreOutput("a", [], prompt_logprobs=(1, logprobs(11, 12)))])
    held.hold([EngineCoreOutput("a", [5], logprobs=logprobs(5), prompt_logprobs=(3, logprobs(13)))])
    held.hold([EngineCoreOutput("a", [6], logprobs=logprobs(6))])
    assert held.release("a") == EngineCoreOutput(
        "a", [5, 6], logprobs=logprobs(5, 6), prompt_logprobs=(1, logprobs(11, 12, 13))
    )
