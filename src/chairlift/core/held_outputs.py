"""What a closed batch has to say, kept until it is over."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.outputs import EngineCoreOutput


class HeldOutputs:
    """Outputs by request, in the order of their steps; joined once, when they are told."""

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}

    def hold(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            self._parts.setdefault(output.request_id, []).append(output)

    def release(self, request_id: str) -> EngineCoreOutput:
        """All that was held for the request; empty if there was nothing.

        The chunks of its prompt logprobs follow one another, since nobody in a closed batch is preempted; a chunk that
        does not reach the prompt's end has no token and no logprobs of one.
        """
        parts = self._parts.pop(request_id, [])
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
        chunks = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        return EngineCoreOutput(
            request_id,
            [token for part in parts for token in part.new_token_ids],
            logprobs=logprobs or None,
            prompt_logprobs=(chunks[0][0], [entry for _, chunk in chunks for entry in chunk]) if chunks else None,
            num_cached_tokens=max((part.num_cached_tokens for part in parts), default=0),
        )
