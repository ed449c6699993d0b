"""What a closed batch has to say, kept until it is over."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.outputs import EngineCoreOutput, TokenLogprobs


class HeldOutputs:
    """One output a request, which grows with every step."""

    def __init__(self) -> None:
        self._outputs: dict[str, EngineCoreOutput] = {}

    def hold(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            held = self._outputs.get(output.request_id)
            self._outputs[output.request_id] = output if held is None else _join(held, output)

    def release(self, request_id: str) -> EngineCoreOutput:
        """All that was held for the request; empty if there was nothing."""
        return self._outputs.pop(request_id, None) or EngineCoreOutput(request_id, [])


def _join(first: EngineCoreOutput, then: EngineCoreOutput) -> EngineCoreOutput:
    return first._replace(
        new_token_ids=first.new_token_ids + then.new_token_ids,
        logprobs=None if first.logprobs is None else first.logprobs + (then.logprobs or []),
        prompt_logprobs=_join_prompt_logprobs(first.prompt_logprobs, then.prompt_logprobs),
        num_cached_tokens=first.num_cached_tokens or then.num_cached_tokens,
    )


def _join_prompt_logprobs(
    first: tuple[int, list[TokenLogprobs]] | None, then: tuple[int, list[TokenLogprobs]] | None
) -> tuple[int, list[TokenLogprobs]] | None:
    """Chunks follow one another, since nobody in a closed batch is preempted."""
    if first is None or then is None:
        return first or then
    return first[0], first[1] + then[1]
