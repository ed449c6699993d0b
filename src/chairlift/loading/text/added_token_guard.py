"""AddedTokenGuard: tokenizes a rendered chat template so that added tokens match in template text only.

The `tokenizers` library matches added tokens anywhere in a text. To restrict the matches, the added tokens of the
template text are replaced with secret aliases, and the text is encoded by a tokenizer with the same normalizer,
pre-tokenizer and model whose added tokens are these aliases. The library therefore splits the text at them, and
encodes the text between two of them as one piece.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from functools import cached_property
from itertools import groupby, pairwise, takewhile
from typing import Final

import tokenizers
from tokenizers import AddedToken

from chairlift.errors import ModelLoadError
from chairlift.loading.text.marked_text import CONTENT, MarkedText, mask_of, template_spans, unmarked
from chairlift.loading.text.text_encoding import encode_text, token_span

NONCE_CHARACTERS: Final = 10
PRIVATE_USE: Final = range(0x100000, 0x10FFFE)
MAX_UNUSED_IDS: Final = 1 << 20
MAX_DEPTH: Final = 40
"""The maximum depth of nested groups in the expression. Deeper strings become alternatives of one group."""

CUT: Final = -1
"""The id of a boundary inside content, which has an alias and produces no token."""


def is_markup(token: AddedToken) -> bool:
    """Whether an added token must not match in content.

    All special tokens are markup, and all others except white space and single characters. Those spell ordinary text,
    and models were trained on text with these tokens.
    """
    if token.special:
        return True
    return len(token.content) > 1 and not token.content.replace("▁", " ").isspace()


class AddedTokenGuard:
    """Encodes marked text for one tokenizer. Safe to use from several threads.

    Args:
        backend: the tokenizer, whose added tokens must not change afterwards.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = added
        self._guarded = {token.content: i for i, token in added.items() if is_markup(token)}
        self._spellings = {i: spelling for spelling, i in self._guarded.items()}
        self._pattern = spelling_pattern(self._guarded)

    @property
    def guarded_tokens(self) -> dict[str, int]:
        """The ids of the added tokens that match in template text only, by their spelling."""
        return dict(self._guarded)

    def encode(self, text: MarkedText, *, add_special_tokens: bool = False) -> list[int]:
        """Encode a prompt so that its content never produces a guarded token, such as `<|im_start|>`.

        Content that does not spell a guarded token is encoded in the same way as by the library.

        Args:
            add_special_tokens: whether to add the tokens that the tokenizer adds before and after a text.
        """
        expected = self._template_tokens(text)
        if expected is not None:
            ids: list[int] = encode_text(self._backend, unmarked(text), add_special_tokens=False).ids
            # Other text produces the unknown token as well.
            if [i for i in ids if i in self._spellings and i != self._unknown_id] == expected:
                return self._add_frame(ids) if add_special_tokens else ids
        ids = self.encode_with_aliases(text)
        return self._add_frame(ids) if add_special_tokens else ids

    def encode_with_aliases(self, text: MarkedText) -> list[int]:
        """Encode like `encode`, but always with aliases, even if content spells no added token."""
        tokenizer = self._aliased
        prompt = self._with_aliases(text)
        while True:
            encoding = encode_text(tokenizer.backend, prompt, add_special_tokens=False, has_offsets=True)
            repaired = tokenizer.spell_unmatched(prompt, encoding)
            if repaired == prompt:
                repaired = tokenizer.cut_formed(prompt, encoding, self._unknown_id)
            if repaired == prompt:
                return [real for i in encoding.ids if (real := tokenizer.real_ids.get(i, i)) != CUT]
            prompt = repaired

    def _template_tokens(self, text: MarkedText) -> list[int] | None:
        """Return the guarded tokens in the text, or None if a spelling of one contains content.

        Overlapping spellings are checked as well.
        """
        mask, plain = mask_of(text), unmarked(text)
        found: list[int] = []
        end = 0
        match = self._pattern.search(plain)
        while match is not None:
            start, stop = match.span()
            if CONTENT in mask[start:stop]:
                return None
            if start >= end:
                found.append(self._guarded[match[0]])
                end = stop
            match = self._pattern.search(plain, start + 1)
        return [i for i in found if i != self._unknown_id]

    def _with_aliases(self, text: MarkedText) -> str:
        """Replace each added token of the template text with its alias."""
        plain = unmarked(text)
        pieces: list[str] = []
        end = 0
        for start, stop in template_spans(text):
            for match in self._pattern.finditer(plain, start, stop):
                pieces += [plain[end : match.start()], self._aliased.alias[self._guarded[match[0]]]]
                end = match.end()
        return "".join([*pieces, plain[end:]])

    def _add_frame(self, ids: list[int]) -> list[int]:
        before, after = self.frame
        return [*before, *ids, *after]

    @cached_property
    def _unknown_id(self) -> int | None:
        return unknown_id(self._backend)

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after any text."""
        bare: list[int] = encode_text(self._backend, "a", add_special_tokens=False).ids
        framed: list[int] = encode_text(self._backend, "a", add_special_tokens=True).ids
        extra = len(framed) - len(bare)
        start = next((start for start in range(extra + 1) if framed[start : start + len(bare)] == bare), extra)
        return framed[:start], framed[start + len(bare) :]

    @cached_property
    def _aliased(self) -> _AliasedTokenizer:
        return _AliasedTokenizer(self._backend, self._added, self._spellings)


class _AliasedTokenizer:
    """The tokenizer with an alias for each guarded token.

    An alias contains a random number of at least 160 bits that never leaves this process, so content cannot contain it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: dict[int, AddedToken], guarded: dict[int, str]) -> None:
        nonce = "".join(chr(secrets.choice(PRIVATE_USE)) for _ in range(NONCE_CHARACTERS))
        self.alias = {i: nonce + _number(index) for index, i in enumerate([CUT, *guarded])}
        self._spellings = guarded
        self._spelling_of_alias = {self.alias[i]: spelling for i, spelling in {CUT: "", **guarded}.items()}
        self._aliases = re.compile(nonce + "..")
        self.backend = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self.backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self.backend.pre_tokenizer = backend.pre_tokenizer
        self._fill_unused_ids()
        self.backend.add_tokens([_renamed(token, self.alias.get(i, token.content)) for i, token in added.items()])
        self.backend.add_tokens([AddedToken(self.alias[CUT], normalized=False, special=True)])
        self.alias_ids = {self._id(alias): i for i, alias in self.alias.items()}
        self.real_ids = {self._id(token.content): i for i, token in added.items() if i not in guarded}
        self.real_ids |= self.alias_ids

    def spell_unmatched(self, prompt: str, encoding: tokenizers.Encoding) -> str:
        """Replace the aliases that the library did not match with the added tokens.

        Some added tokens match only between spaces.
        """
        found = [token_span(encoding, index) for index, i in enumerate(encoding.ids) if i in self.alias_ids]
        pending = iter([*found, (len(prompt), len(prompt))])
        start, end = next(pending)

        def spell(match: re.Match[str]) -> str:
            nonlocal start, end
            if match.start() < start or end < match.end():
                return self._spelling_of_alias[match[0]]
            start, end = next(pending)
            return match[0]

        return self._aliases.sub(spell, prompt)

    def cut_formed(self, prompt: str, encoding: tokenizers.Encoding, unknown_id: int | None) -> str:
        """Cut each text that was tokenized as a guarded token, so that merges cannot form the token."""
        formed = (
            (i, *token_span(encoding, index))
            for index, i in enumerate(encoding.ids)
            if i in self._spellings and i not in self.real_ids
        )
        cuts = [
            start + (end - start) // 2
            for i, start, end in formed
            if end - start > 1 and (i != unknown_id or prompt[start:end] == self._spellings[i])
        ]
        return self.alias[CUT].join(prompt[start:end] for start, end in pairwise([0, *cuts, len(prompt)]))

    def _id(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        assert token_id is not None, "it was added"
        return token_id

    def _fill_unused_ids(self) -> None:
        """Add tokens for the gaps of the vocabulary, because the library numbers added tokens from its size on."""
        ids = self.backend.get_vocab(with_added_tokens=False).values()
        unused = max(ids, default=-1) + 1 - len(ids)
        if unused > MAX_UNUSED_IDS:
            raise ModelLoadError(f"the vocabulary has {len(ids)} tokens but ids up to {max(ids)}; it is damaged")
        fillers = (self.alias[CUT] + _number(index) for index in range(unused))
        self.backend.add_tokens([AddedToken(filler, normalized=False) for filler in fillers])


def _renamed(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _number(index: int) -> str:
    """Return a number as two characters, so that no alias is a prefix of another one."""
    return "".join(chr(PRIVATE_USE.start + digit) for digit in divmod(index, len(PRIVATE_USE)))


def unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id of text that the vocabulary does not cover, or None if the model has no such token."""
    model = backend.model
    if isinstance(model, tokenizers.models.Unigram):
        found = json.loads(model.__getstate__())["unk_id"]
        return found if isinstance(found, int) else None
    unknown = getattr(model, "unk_token", None)
    return backend.token_to_id(unknown) if isinstance(unknown, str) else None


def spelling_pattern(spellings: Collection[str]) -> re.Pattern[str]:
    """Return an expression that matches the longest spelling at a position, or nothing if there are no spellings.

    It is a trie, so the time at one position depends on the length of the spellings, and not on their number.
    """
    return re.compile(_alternatives(sorted(set(spellings)), 0) if spellings else r"(?!)")


def _alternatives(spellings: list[str], depth: int) -> str:
    """Return an expression for sorted, distinct strings."""
    if depth == MAX_DEPTH:
        return _group([re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True)])
    optional = "?" if spellings[0] == "" else ""
    branches = []
    for _, group in groupby(spellings[1:] if optional else spellings, key=lambda spelling: spelling[0]):
        same = list(group)
        prefix = _common_prefix(same[0], same[-1])
        rest = [spelling[len(prefix) :] for spelling in same]
        branches.append(re.escape(prefix) + (_alternatives(rest, depth + 1) if len(rest) > 1 else ""))
    return _group(branches) + optional


def _common_prefix(first: str, last: str) -> str:
    """Return the common prefix of all strings between these two in sorted order."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(left for left, _ in shared)


def _group(branches: list[str]) -> str:
    return f"(?:{'|'.join(branches)})"
