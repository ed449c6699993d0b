"""The logprobs of the tokens of an answer or a prompt, as `LLM` returns them."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.engine.llm_outputs import LogprobsById


def first_logprobs(positions: Iterable[LogprobsById | None]) -> list[float]:
    """The logprob of the first token at each position, which is that of the text."""
    return [next(iter(entries.values())).logprob for entries in positions if entries]
