"""Text from a stream of tokens: whole characters only, stop strings cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Decodes a sequence as it grows; the concatenation is the text of the whole.

        ids:  ... context ... | emitted | held back |
                    ^ _prefix  ^ _read

    A decoder may write a token differently after others (a leading space, half a character), so new text is the
    difference of two decodings that share their left context. A tail that ends in half a character is held back.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._prefix = 0
        self._read = len(self._ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; returns the text that is certain now."""
        self._ids += token_ids
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._emit()
        return text

    def flush(self) -> str:
        """The text held back, as it is: no more tokens will come."""
        text = self._new_text()
        self._emit()
        return text

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._prefix : self._read])
        return self._decode(self._ids[self._prefix :])[len(known) :]

    def _emit(self) -> None:
        del self._ids[: self._prefix]
        self._prefix, self._read = max(0, self._read - self._prefix - CONTEXT_TOKENS), len(self._ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Watches a stream of text for stop strings, holding back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Take in text; returns what may be shown now, and the stop string that ended it, if one did."""
        if not self._stop:
            return text, None
        self._held += text
        found = min(
            ((at, s) for s in self._stop if (at := self._held.find(s)) >= 0),
            key=lambda match: (match[0] + len(match[1]), match[0]),
            default=None,
        )
        if found is not None:
            at, string = found
            shown = self._held[: at + len(string) if self._include else at]
            self._held = ""
            return shown, string
        keep = max(map(self._overlap, self._stop))
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def flush(self) -> str:
        """The text held back: no more will come."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """The length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
