"""Log-probabilities in the forms that answers have them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from chairlift.engine.detokenizer import Decoder
from chairlift.outputs import Logprob, TokenLogprobs

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's number)."""


def token_text(token: bytes) -> str:
    """A token as text; where it is no whole character, its bytes as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class LogprobWriter:
    """Writes logprobs as plain JSON values.

    Args:
        as_ids: tokens are written `token_id:7` (vLLM's `return_tokens_as_token_ids`).
    """

    def __init__(self, decoder: Decoder, as_ids: bool) -> None:
        self._decoder = decoder
        self._as_ids = as_ids

    def chat(self, positions: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Chat completions and responses: one entry a position."""
        return [
            {**self._chat_entry(position.token), "top_logprobs": [self._chat_entry(entry) for entry in position.top]}
            for position in positions
        ]

    def completion(self, positions: Iterable[TokenLogprobs | None], first: str, offset: int) -> dict[str, Any]:
        """Completions: four lists.

        Args:
            positions: None for the first token of an echoed prompt, which is `first`.
            offset: of the first token in the text.
        """
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            token = first if position is None else self.text(position.token.token_id)
            lists["tokens"].append(token)
            lists["text_offset"].append(offset)
            lists["token_logprobs"].append(None if position is None else _finite(position.token.logprob))
            lists["top_logprobs"].append(None if position is None else self._top(position))
            offset += len(token)
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


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
