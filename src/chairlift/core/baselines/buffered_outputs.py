"""Buffers the outputs of a static batch until the batch is complete."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.outputs import EngineCoreOutput


class BufferedOutputs:
    """Outputs by request, in the order of their steps; they are joined once, when they are taken."""

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}

    def add(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            self._parts.setdefault(output.request_id, []).append(output)

    def take(self, request_id: str) -> EngineCoreOutput:
        """Remove and return the joined outputs of the request; an empty output if there are none.

        The chunks of its prompt logprobs follow one another, because no member of a static batch is preempted. A chunk
        that does not reach the end of the prompt has neither a token nor the logprobs of one.
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
