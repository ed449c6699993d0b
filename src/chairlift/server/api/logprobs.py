"""Logprobs in the forms of the API: of chats, of completions, and of prompts."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from msgspec import Raw

from chairlift.engine.detokenizer import TokenDecoder
from chairlift.outputs import Logprob, TokenLogprobs
from chairlift.server.protocol.encoding import encode

MIN_LOGPROB: Final = -9999.0
"""The value for minus infinity, which JSON does not have; the same as in vLLM."""


def token_text(token: bytes) -> str:
    """A token as text. A token that is not valid UTF-8 becomes `bytes:\\x..`, as at OpenAI."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TextOffsets:
    """Computes the offset of each token in a text, in characters.

    A token that continues a character has the offset of this character.

    Args:
        start: the offset of the first token. It is negative if the text omits leading tokens, such as BOS; their offset
            is 0.
        hidden: tokens that are omitted from the text.
    """

    def __init__(self, decoder: TokenDecoder, start: int = 0, hidden: Collection[int] = ()) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._offset = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def for_prompt(cls, decoder: TokenDecoder, token_ids: Iterable[int], text: str) -> TextOffsets:
        """Offsets for a prompt, computed from the end of its text."""
        spelled = b"".join(map(decoder.token_bytes, token_ids))
        return cls(decoder, len(text) - len(spelled.decode(errors="replace")))

    def advance(self, token_id: int) -> int:
        """Return the offset of the next token, and move behind it."""
        offset = max(0, self._offset)
        if token_id not in self._hidden:
            self._offset += len(self._utf8.decode(self._decoder.token_bytes(token_id)))
        return offset


class LogprobWriter:
    """Converts logprobs to plain JSON values.

    Args:
        as_token_ids: write tokens as `token_id:7` (`return_tokens_as_token_ids` of vLLM).
    """

    def __init__(self, decoder: TokenDecoder, as_token_ids: bool = False) -> None:
        self._decoder = decoder
        self._as_token_ids = as_token_ids

    def chat(self, position: TokenLogprobs) -> dict[str, Any]:
        """The form of chat completions and responses."""
        return {**self._chat_entry(position.token), "top_logprobs": [self._chat_entry(entry) for entry in position.top]}

    def chat_json(self, positions: Sequence[TokenLogprobs]) -> bytes:
        """The entries of `chat` as a JSON list. Positions are encoded one by one, because the objects of an answer with
        hundreds of thousands of entries would need much memory."""
        return _json_list(map(self.chat, positions))

    def prompt_json(self, positions: Sequence[TokenLogprobs | None]) -> bytes:
        """The form of vLLM as a JSON list: for each position token id -> logprob, rank and text, and null for the first
        position. Positions are encoded as in `chat_json`."""
        return _json_list(
            None
            if position is None
            else {str(entry.token_id): self._prompt_entry(entry) for entry in (*position.top, position.token)}
            for position in positions
        )

    def completion(
        self, positions: Iterable[TokenLogprobs | None], offsets: TextOffsets, first: int = -1
    ) -> dict[str, list[Any]]:
        """The form of completions: four lists, with the entries of `top_logprobs` encoded as JSON.

        Args:
            positions: the logprobs of each token; None for the first token of an echoed prompt.
            offsets: computes the offsets of these tokens.
            first: the first token of an echoed prompt.
        """
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            token_id = first if position is None else position.token.token_id
            lists["tokens"].append(self.text(token_id))
            lists["text_offset"].append(offsets.advance(token_id))
            lists["token_logprobs"].append(None if position is None else _finite(position.token.logprob))
            entries = () if position is None else (position.token, *position.top)
            top = {self.text(entry.token_id): _finite(entry.logprob) for entry in entries}
            lists["top_logprobs"].append(Raw(encode(top)) if top else None)
        return lists

    def text(self, token_id: int) -> str:
        """A token as text, or as its id."""
        return f"token_id:{token_id}" if self._as_token_ids else token_text(self._decoder.token_bytes(token_id))

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
