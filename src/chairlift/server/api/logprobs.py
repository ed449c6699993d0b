"""Log-probabilities in the forms that answers have them in."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from msgspec import Raw

from chairlift.engine.detokenizer import TokenDecoder
from chairlift.outputs import Logprob, TokenLogprobs
from chairlift.server.api.stream_chunks import encode

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's number)."""


def token_text(token: bytes) -> str:
    """A token as text; where it is no whole character, its bytes as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TextOffsets:
    """Where tokens begin in a text, in characters; one that continues a character begins where that does.

    Args:
        start: where the first one begins. Below 0 if the tokens say more than the text, such as BOS: what is before the
            text begins at 0.
        hidden: tokens that are not in the text.
    """

    def __init__(self, decoder: TokenDecoder, start: int = 0, hidden: Collection[int] = ()) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._at = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def of_prompt(cls, decoder: TokenDecoder, token_ids: Iterable[int], text: str) -> TextOffsets:
        """Of a prompt whose text ends where its tokens do."""
        spelled = b"".join(map(decoder.token_bytes, token_ids))
        return cls(decoder, len(text) - len(spelled.decode(errors="replace")))

    def take(self, token_id: int) -> int:
        """Where this token begins, which follows the ones before."""
        at = max(0, self._at)
        if token_id not in self._hidden:
            self._at += len(self._utf8.decode(self._decoder.token_bytes(token_id)))
        return at


class LogprobWriter:
    """Writes logprobs as plain JSON values.

    Args:
        as_ids: tokens are written `token_id:7` (vLLM's `return_tokens_as_token_ids`).
    """

    def __init__(self, decoder: TokenDecoder, as_ids: bool) -> None:
        self._decoder = decoder
        self._as_ids = as_ids

    def chat(self, positions: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Chat completions and responses: one entry a position."""
        return [
            {**self._chat_entry(position.token), "top_logprobs": [self._chat_entry(entry) for entry in position.top]}
            for position in positions
        ]

    def chat_json(self, positions: Sequence[TokenLogprobs]) -> bytes:
        """The entries of `chat` as a JSON list. One position after the other becomes bytes, so that an answer with
        hundreds of thousands of entries is never held as objects."""
        return _json_list(entry for position in positions for entry in self.chat([position]))

    def prompt_json(self, positions: Sequence[TokenLogprobs | None]) -> bytes:
        """The entries of `prompt` as a JSON list; see `chat_json`."""
        return _json_list(entry for position in positions for entry in self.prompt([position]))

    def completion(
        self, positions: Iterable[TokenLogprobs | None], offsets: TextOffsets, first: int = -1
    ) -> dict[str, list[Any]]:
        """Completions: four lists; the entries of `top_logprobs` are JSON already.

        Args:
            positions: None for the first token of an echoed prompt, which is `first`.
            offsets: take these tokens.
        """
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            token_id = first if position is None else position.token.token_id
            lists["tokens"].append(self.text(token_id))
            lists["text_offset"].append(offsets.take(token_id))
            lists["token_logprobs"].append(None if position is None else _finite(position.token.logprob))
            lists["top_logprobs"].append(None if position is None else Raw(encode(self._top(position))))
        return lists

    def prompt(self, positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's form: for each position, token id -> logprob, rank and text; null for the first."""
        return [
            None
            if position is None
            else {str(entry.token_id): self._prompt_entry(entry) for entry in (*position.top, position.token)}
            for position in positions
        ]

    def text(self, token_id: int) -> str:
        """How a token is written."""
        return f"token_id:{token_id}" if self._as_ids else token_text(self._decoder.token_bytes(token_id))

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        return {self.text(entry.token_id): _finite(entry.logprob) for entry in (position.token, *position.top)}

    def _chat_entry(self, entry: Logprob) -> dict[str, Any]:
        token = self._decoder.token_bytes(entry.token_id)
        return {"token": self.text(entry.token_id), "logprob": _finite(entry.logprob), "bytes": list(token)}

    def _prompt_entry(self, entry: Logprob) -> dict[str, Any]:
        text = token_text(self._decoder.token_bytes(entry.token_id))
        return {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": text}


def _json_list(entries: Iterable[Any]) -> bytes:
    return b"[%b]" % b",".join(map(encode, entries))


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
