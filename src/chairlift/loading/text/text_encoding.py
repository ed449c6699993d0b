"""From text to tokens: the only calls that encode with the `tokenizers` library, and the cuts of long texts.

A TextCutter finds positions at which a text can be cut without a change of its tokens, so that the beginning or the end
of a long text is tokenized alone. Such a position is before a space between two ASCII letters, if

- the normalizer changes each side in the same way as the whole text,
- no added token contains a letter and the space after it, or takes that space as its margin, and
- the pre-tokenizer splits there and no expression of it matches across the position, or the model is a BPE that has the
  space in its vocabulary, but no token with a letter before a space, so that no merge crosses the position.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, Final

import tokenizers
from tokenizers import models

from chairlift.loading.text.split_patterns import JOINING, PRE_TOKENIZERS
from chairlift.loading.text.tokenizer_class import SPACE, steps

# A call encodes one text. Threads of the library would only make it wait for other texts.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHARACTERS_PER_TOKEN: Final = 8
"""The length of a part of a text, in characters for each token that is needed. More parts follow if necessary."""
MIN_PART: Final = 4096  # characters

BORDER: Final = re.compile(r"[A-Za-z] (?=[A-Za-z])")
JOINED: Final = re.compile(f"[A-Za-z][ {SPACE}]")
LOCAL_NORMALIZERS: Final = frozenset(
    ("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled")
)
LOCAL_PRE_TOKENIZERS: Final = frozenset(
    ("Sequence", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation")
)
LOCAL_PATTERNS: Final = frozenset(pattern for rules in PRE_TOKENIZERS.values() for pattern in rules.patterns) - JOINING
"""Expressions that match each ASCII letter, or none, and never match or look across a letter and a space after it."""


def encode_text(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, has_offsets: bool = False
) -> tokenizers.Encoding:
    """Encode a text while other threads run Python, which `encode` of the library does not permit.

    Args:
        has_offsets: whether the result has the positions of the tokens in the text.
    """
    encode = backend.encode_batch if has_offsets else backend.encode_batch_fast
    return encode([text], add_special_tokens=add_special_tokens)[0]


def token_span(encoding: tokenizers.Encoding, index: int) -> tuple[int, int]:
    """The position of a token in its text. All `offsets` of a million tokens would hold Python's lock for 0.2 s."""
    span: tuple[int, int] | None = encoding.token_to_chars(index)
    assert span is not None, "the index belongs to a token of the text"
    return span


class TextCutter:
    """Cuts texts into parts that have, one after the other, the same tokens as the whole text.

    Args:
        backend: the tokenizer.

    Attributes:
        can_cut: whether there are certain cuts for the tokenizer. If not, each text is one part.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.can_cut = _has_cuts(backend)

    def parts(self, text: str, num_tokens: int, *, from_end: bool = False) -> Iterator[str]:
        """Yield the parts of a text, from its beginning or from its end; the first one has about `num_tokens` tokens.

        The last part is the rest of the text. It is long if the text has no cuts, such as a text without spaces.
        """
        size = max(MIN_PART, CHARACTERS_PER_TOKEN * num_tokens)
        start, end = 0, len(text)
        while self.can_cut and end - start > 2 * size:
            at = end - 2 * size if from_end else start + size
            border = BORDER.search(text, at, at + size)
            if border is None:
                break
            cut = border.start() + 1
            yield text[cut:end] if from_end else text[start:cut]
            start, end = (start, cut) if from_end else (cut, end)
        yield text[start:end]


def _has_cuts(backend: tokenizers.Tokenizer) -> bool:
    """Whether the position before a space between two ASCII letters is always a cut; see the module."""
    normalizers, splits = list(steps(backend.normalizer)), list(steps(backend.pre_tokenizer))
    if not all(step["type"] in LOCAL_NORMALIZERS or _replaces_spaces(step) for step in normalizers):
        return False
    if any(map(_crosses_cut, backend.get_added_tokens_decoder().values())):
        return False
    if all(step["type"] in LOCAL_PRE_TOKENIZERS or _is_local_split(step) for step in splits):
        pieces = [] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str("a a")
        if any(start == 1 or end == 1 for _, (start, end) in pieces):
            return True
    model, marks_spaces = backend.model, any(map(_replaces_spaces, normalizers))
    return (
        isinstance(model, models.BPE)
        and not (model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix)
        and all(step["type"] == "Metaspace" or (marks_spaces and _splits_at_spaces(step)) for step in splits)
        and (marks_spaces or bool(splits))
        and backend.token_to_id(SPACE) is not None
        and not any(map(JOINED.search, backend.get_vocab(with_added_tokens=False)))
    )


def _crosses_cut(token: tokenizers.AddedToken) -> bool:
    """Whether an added token may match across a cut, or match only if the text is cut."""
    takes_space = token.rstrip and token.content[-1:].isalpha()
    is_word = token.single_word and token.content[:1] in (" ", SPACE)
    return takes_space or is_word or JOINED.search(token.content) is not None


def _replaces_spaces(step: dict[str, Any]) -> bool:
    """Whether a step replaces each space by ▁."""
    return step.get("pattern") == {"String": " "} and step.get("content") == SPACE


def _splits_at_spaces(step: dict[str, Any]) -> bool:
    """Whether a step splits at spaces only, of which a text without spaces has none."""
    return (step["type"], step.get("pattern")) == ("Split", {"String": " "})


def _is_local_split(step: dict[str, Any]) -> bool:
    is_known = step["type"] == "Split" and step["pattern"].get("Regex") in LOCAL_PATTERNS
    return bool(is_known and step["behavior"] == "Isolated" and not step["invert"])
