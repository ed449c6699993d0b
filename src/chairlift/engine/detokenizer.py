"""Incremental detokenization: the text of a growing sequence in whole characters, and the search for stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from chairlift.grammar.answer_start import overlap

REPLACEMENT: Final = "\ufffd"
LOOK_BACK: Final = 16
"""Maximum number of prompt tokens that are searched for a left context."""

MAX_HELD: Final = 64
"""Maximum number of tokens that are held back for an incomplete character; more than that are not valid text."""


class TokenDecoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Decodes a sequence as it grows. The concatenation of the returned texts is the text of the whole sequence, except
    in the two cases described at the end.

        ids:  prompt, emitted ... | last emitted piece | not yet emitted |
                                   `----- _context ----' `---- _held ----'

    The text of a token may depend on the tokens before it (a leading space, half a character). New text is therefore
    the difference of two decodings with the same left context: the last emitted piece, which begins and ends between
    characters, or the end of the prompt. A tail that ends within a character is held back. Tokens that decode to
    nothing are dropped, because they are neither text nor context.

    The concatenation differs from the text of the whole sequence in two cases. Byte fallback replaces whole characters
    when stray bytes follow them, but those characters are already emitted. And a character that the prompt leaves
    incomplete is emitted whole.
    """

    def __init__(
        self, decoder: TokenDecoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        tail = list(prompt_token_ids[-LOOK_BACK:])
        end = len(tail) - self._num_unfinished(tail)
        self._context, self._held = self._prompt_context(tail[:end]), tail[end:]
        self._known = self._decode(self._context) + self._decode(self._held).rstrip(REPLACEMENT)

    def add(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the new text that later tokens cannot change."""
        return "".join(map(self._add, token_ids))

    def flush(self) -> str:
        """End the sequence; returns the text that was held back."""
        text = self._new_text()
        self._emit()
        return text

    def _add(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD:
            return ""
        if text:
            self._emit()
        elif not self._decode([token_id, token_id]):  # twice, because a leading space is dropped
            self._held.pop()
        return text

    def _num_unfinished(self, tail: list[int]) -> int:
        """The number of tokens at the end that belong to an incomplete character, which has at most 4 bytes."""
        entries = [self._decoder.token_bytes(token_id) for token_id in tail[-4:]]
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(b"".join(entries))
        unfinished = len(utf8.getstate()[0])
        return next(n for n in range(5) if sum(map(len, entries[len(entries) - n :])) >= unfinished)

    def _prompt_context(self, tail: list[int]) -> list[int]:
        """The shortest suffix of `tail` whose text begins with a whole character; `tail` itself if there is none."""
        ends = (tail[start:] for start in range(len(tail) - 1, -1, -1))
        return next((end for end in ends if self._decode(end)[:1] not in ("", REPLACEMENT)), tail)

    def _new_text(self) -> str:
        text = self._decode(self._context + self._held)
        if text.startswith(self._known):
            return text[len(self._known) :]
        return self._decode(self._held)  # stray bytes have changed the end of the context

    def _emit(self) -> None:
        self._context, self._held = self._held, []
        self._known = self._decode(self._context)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Searches a stream of text for stop strings, and holds back text that may be the beginning of one."""

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_in_output
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Add text; returns the text that can be emitted, and the stop string that was found, if any."""
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
        keep = overlap(self._held, self._stop)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def flush(self) -> str:
        """End the text; returns the part that was held back."""
        text, self._held = self._held, ""
        return text
