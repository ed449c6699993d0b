"""The base class of completions and chat completions, whose chunks and whole responses have one form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.server.api.engine_call import GeneratingCall, Plans
from chairlift.server.api.logprobs import LogprobWriter
from chairlift.server.protocol.base import UsageInfo
from chairlift.server.protocol.encoding import DONE, to_chunk
from chairlift.server.protocol.sampling import SamplingFields

ChunkFields = TypeVar("ChunkFields", bound=SamplingFields)
Choice = dict[str, Any]
"""An entry of `choices`: `ChatCompletionResponseChoice` or `CompletionResponseChoice` as plain values."""


class ChunkCall(GeneratingCall[ChunkFields, Plans]):
    """The base class of the calls of completions and chat completions.

    Attributes:
        kinds: the field `object` of a whole response, and of a chunk.
    """

    kinds: ClassVar[tuple[str, str]]
    pings_after_event = False  # Benchmarks that read chunks of OpenAI take each later line for one.

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self.num_choices = self.plan.params.n
        options = self.body.stream_options
        self._sends_usage = bool(options and options.include_usage)
        self._sends_all_usage = self._sends_usage and bool(options and options.continuous_usage_stats)
        self.logprobs = LogprobWriter(self.llm.engine.tokenizer, bool(self.body.return_tokens_as_token_ids))

    @abstractmethod
    def choices(self, index: int, output: RequestOutput) -> Iterable[Choice]:
        """The choices with new output of prompt `index`; in a whole response they have all of its output."""

    def new_choice(self, number: int, answer: CompletionOutput, **content: Any) -> Choice:
        """A choice with its content, and the fields that completions and chats share. The stop reason is in the last
        chunk of an answer."""
        choice = {"index": number, **content, "finish_reason": answer.finish_reason}
        if answer.finish_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def has_output(self, answer: CompletionOutput) -> bool:
        """Whether an answer needs a chunk even if its new tokens have not become text yet."""
        return answer.finish_reason is not None or bool(answer.logprobs) or bool(self.body.return_token_ids)

    def total_usage(self) -> UsageInfo:
        """The token counts at the end of the call."""
        return self.usage.usage()

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [choice for index, output in enumerate(outputs) for choice in self.choices(index, output)]
        response = self._chunk(choices, usage=self.total_usage())
        if (timings := self.timings()) is not None:
            response["timings"] = timings
        return response

    def delta(self, index: int, output: RequestOutput) -> bytes:
        return b"".join(map(self.event, self.choices(index, output)))

    def event(self, choice: Choice) -> bytes:
        """A chunk with one choice. If a last chunk has the token counts, others have null, or with
        `continuous_usage_stats` the counts so far."""
        usage = {"usage": self.usage.usage() if self._sends_all_usage else None} if self._sends_usage else {}
        return to_chunk(self._chunk([choice], **usage))

    def closing(self) -> bytes:
        events = to_chunk(self._chunk([], usage=self.total_usage())) if self._sends_usage else b""
        if (timings := self.timings()) is not None:
            events += to_chunk(self._chunk([], timings=timings))
        return events + DONE

    def _chunk(self, choices: list[Choice], **fields: Any) -> dict[str, Any]:
        kind = self.kinds[bool(self.body.stream)]
        common = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return common | fields
