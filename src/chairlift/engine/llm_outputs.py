"""The outputs of `LLM` in the shape of vLLM's: logprobs by token id, with the text of each token, and beams."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from chairlift.engine.detokenizer import TokenDecoder
from chairlift.engine.input_processor import NoTokenizer
from chairlift.lora import LoRARequest
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs

REPLACEMENT: Final = "\ufffd"
MAX_TOKENS_BEFORE: Final = 4  # of a token that completes a character


class DecodedLogprob(NamedTuple):
    """The log-probability of a token, its rank (1 is the most likely token), and its text; None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


LogprobsById = dict[int, DecodedLogprob]
"""The logprobs at one position by token id: of its token, which is the first, and of the most likely tokens."""


@dataclass(slots=True)
class LLMCompletion(CompletionOutput):
    """One answer to a prompt, whose logprobs have vLLM's form."""

    logprobs: list[LogprobsById] | None = None  # type: ignore[assignment]


@dataclass(slots=True)
class LLMOutput(RequestOutput):
    """A request with its answers, whose logprobs have vLLM's form. The first prompt token has None."""

    outputs: list[LLMCompletion]  # type: ignore[assignment]
    prompt_logprobs: list[LogprobsById | None] | None = None  # type: ignore[assignment]


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the best sequences of a beam search.

    Attributes:
        orig_prompt: the text of the prompt, or None for token ids, and its token ids.
        tokens: the prompt and the output.
        logprobs: the logprobs at each position of the output.
        cum_logprob: the sum of the logprobs of the output's tokens.
        text: the text of all tokens, of the prompt as well.
    """

    orig_prompt: dict[str, Any]
    tokens: list[int]
    logprobs: list[LogprobsById]
    lora_request: LoRARequest | str | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of a beam search, the best one first, as many as there are beams."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(
        cls, output: LLMOutput, lora_request: LoRARequest | str | None, decode: Callable[[list[int]], str]
    ) -> BeamSearchOutput:
        """The sequences of a request with `use_beam_search`, whose text `decode` makes."""
        prompt = {"type": "token", "prompt_token_ids": output.prompt_token_ids, "prompt": output.prompt}
        tokens = [[*output.prompt_token_ids, *answer.token_ids] for answer in output.outputs]
        return cls(
            [
                BeamSearchSequence(
                    prompt,
                    each,
                    answer.logprobs or [],
                    lora_request,
                    answer.cumulative_logprob or 0.0,
                    decode(each),
                    answer.finish_reason,
                    answer.stop_reason,
                )
                for each, answer in zip(tokens, output.outputs, strict=True)
            ]
        )


class _TokenTexts(dict[int, str | None]):
    """Token id -> its text, as at vLLM: a token that ends inside a character has none, and one that completes the
    character has that of the tokens `before` too. None without a tokenizer."""

    def __init__(self, decoder: TokenDecoder, before: bytes = b"") -> None:
        self._decoder, self._before = None if isinstance(decoder, NoTokenizer) else decoder, before

    def __missing__(self, token_id: int) -> str | None:
        text = None
        if self._decoder is not None:
            spelled = self._decoder.token_bytes(token_id)
            text = spelled.decode(errors="replace")
            if text.endswith(REPLACEMENT):
                text = (self._before + spelled).decode(errors="replace")
                text = "" if text.endswith(REPLACEMENT) else text
        self[token_id] = text
        return text


class LogprobDecoder:
    """Converts logprobs to vLLM's form."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder, self._texts = decoder, _TokenTexts(decoder)

    def output(self, output: RequestOutput) -> LLMOutput:
        """The output with logprobs in vLLM's form."""
        answers = [
            LLMCompletion(**_values(answer, logprobs=answer.logprobs and self._positions(answer.logprobs)))
            for answer in output.outputs
        ]
        prompt = output.prompt_logprobs
        return LLMOutput(**_values(output, outputs=answers, prompt_logprobs=prompt and self._positions(prompt)))

    def _positions(self, positions: Sequence[TokenLogprobs | None]) -> list[LogprobsById | None]:
        utf8, found = codecs.getincrementaldecoder("utf-8")("replace"), list[LogprobsById | None]()
        before: list[bytes] = []  # The last tokens, each of which ends inside a character.
        for position in positions:
            if position is None:
                found.append(None)
                continue
            texts = _TokenTexts(self._decoder, b"".join(before)) if before else self._texts
            entries = (position.token, *position.top)
            found.append({token: DecodedLogprob(logprob, rank, texts[token]) for token, logprob, rank in entries})
            spelled = self._decoder.token_bytes(position.token.token_id)
            utf8.decode(spelled)
            before = [*before[1 - MAX_TOKENS_BEFORE :], spelled] if utf8.getstate()[0] else []
        return found


def _values(record: Any, **changed: Any) -> dict[str, Any]:
    """The fields of a record, with other values for some."""
    return {each.name: getattr(record, each.name) for each in fields(record)} | changed
