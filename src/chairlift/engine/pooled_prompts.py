"""PooledPrompts: the tokens of texts and pairs of texts of which a model computes vectors or scores."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

from chairlift.errors import ModelLoadError, RequestError
from chairlift.loading.text.marked_text import MarkedText
from chairlift.loading.text.rerank_prompt import encode_rerank_prompt
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.pooling import PooledTextConfig, PoolingConfig

PAIR_ROLES: Final = ("query", "document")
NAMES_ROLES: Final = [re.compile(f"""['"]{role}['"]""") for role in PAIR_ROLES]
READS_PARTS: Final = re.compile(r"""content\[0\]|\.type|['"]type['"]|message\.content\[""")
"""Text of chat templates that read the content of a message as a list of parts, as in sentence-transformers."""
FILLERS: Final = ("0", "1 2 3 4")
"""Texts with different tokens. What two prompts with them have in common at the end is written by the template."""
MAX_CACHED_PROMPT: Final = 4096  # characters of a prompt whose suffix is cached


@dataclass(frozen=True, slots=True)
class PooledOptions:
    """The options of a request for the tokens of its texts.

    Attributes:
        truncate_prompt_tokens: maximum number of tokens of a text; -1 is the maximum of the model; None raises an error
            for a text that is too long.
        truncation_side: the side that is cut off; None for that of the model.
        add_special_tokens: whether the tokens for the beginning and the end of a text are added; None for what the
            model needs.
        instruction: replaces the instruction or the prompt of a template; None for that of the model.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    instruction: str | None = None


def with_tokenizer(pooling: PoolingConfig, tokenizer: Tokenizer, name: str) -> PoolingConfig:
    """The pooling with what depends on the tokenizer: the length of a prompt that is not pooled, and whether the chat
    template has a form for pairs.

    Raises:
        ModelLoadError: texts or pairs cannot be rendered with the chat template.
    """
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.text
    if pooling.has_own_prompt and all(pattern.search(template) for pattern in NAMES_ROLES):
        form: Any = "structured" if READS_PARTS.search(template) else "flat"
        pooling = replace(pooling, has_own_prompt=False, text=replace(pooling.text, message_format=form))
    if pooling.text.message_format is not None:
        _check_template(pooling, tokenizer, name)
    if pooling.includes_prompt:
        return pooling
    tokens = tokenizer.encode(pooling.text.prompt, add_special_tokens=pooling.text.adds_special_tokens)
    return replace(
        pooling, num_unpooled=len(tokens) - any(token in tokenizer.special_token_ids for token in tokens[-1:])
    )


def _check_template(pooling: PoolingConfig, tokenizer: Tokenizer, name: str) -> None:
    second = FILLERS[1] if pooling.task == "score" else None
    try:
        text = tokenizer.render_chat(_messages(pooling.text, FILLERS[0], second, pooling.text.prompt))
    except RequestError as error:
        raise ModelLoadError(f"model {name!r}: its texts cannot be rendered: {error}") from None
    if FILLERS[0] not in text or (second or "") not in text:
        raise ModelLoadError(
            f"model {name!r}: the chat template does not write the texts of messages with the roles "
            f"{' and '.join(PAIR_ROLES) if second else 'user'}: use the template that belongs to this model"
        )


def _messages(config: PooledTextConfig, text: str, second: str | None, prompt: str) -> list[dict[str, Any]]:
    """The conversation of a text, or of a query and a document."""
    turns = [("system", prompt)] if prompt else []
    turns += [("user", text)] if second is None else list(zip(PAIR_ROLES, (text, second), strict=True))
    if config.message_format == "flat":
        return [{"role": role, "content": content} for role, content in turns]
    return [{"role": role, "content": [{"type": "text", "text": content}]} for role, content in turns]


class PooledPrompts:
    """Encodes the texts of a model.

    Args:
        num_types: the number of types of tokens that the model has.
    """

    def __init__(self, tokenizer: Tokenizer, pooling: PoolingConfig, num_types: int) -> None:
        self._tokenizer, self._pooling, self._config = tokenizer, pooling, pooling.text
        self._has_types = num_types > 1 and pooling.text.has_token_types
        self._suffix = lru_cache(maxsize=64)(self._template_suffix)

    def encode(
        self, text: str, second: str | None, options: PooledOptions, most: int | None
    ) -> tuple[list[int], list[int] | None]:
        """The tokens of a text or of a pair, and their types; None if all tokens have type 0.

        Args:
            most: the number of tokens to which texts are cut off; None for no limit.

        Raises:
            RequestError: the limit leaves no room for texts, or an option does not fit a prompt that is not pooled.
        """
        self._check_keeps_prompt(options, most)
        config, instruction = self._config, options.instruction
        if self._pooling.has_own_prompt and second is not None:
            return encode_rerank_prompt(self._tokenizer, text, second, most, instruction or config.prompt), None
        if config.message_format is not None:
            return self._encode_messages(text, second, options, most), None
        adds = config.adds_special_tokens if options.add_special_tokens is None else options.add_special_tokens
        ids, types = self._tokenizer.encode_pair(
            config.prompt + text, second, most, add_special_tokens=adds, cuts_start=self._cuts_start(options)
        )
        return ids, types if self._has_types else None

    def _check_keeps_prompt(self, options: PooledOptions, most: int | None) -> None:
        """Raise RequestError if the first `num_unpooled` tokens would not be those of the prompt."""
        if not self._pooling.num_unpooled:
            return
        problem = "because this model leaves the first tokens, which are its prompt, out of the vector"
        if most is not None and self._cuts_start(options):
            raise RequestError(f"truncation_side must be right with a truncation, {problem}", "truncation_side")
        if options.add_special_tokens not in (None, adds := self._config.adds_special_tokens):
            raise RequestError(f"add_special_tokens must be {str(adds).lower()}, {problem}", "add_special_tokens")

    def cut(self, token_ids: list[int], options: PooledOptions, most: int | None) -> list[int]:
        """The tokens of a text that are kept."""
        if most is None:
            return token_ids
        return token_ids[-most:] if self._cuts_start(options) else token_ids[:most]

    def _cuts_start(self, options: PooledOptions) -> bool:
        return self._config.cuts_start if options.truncation_side is None else options.truncation_side == "left"

    def _encode_messages(self, text: str, second: str | None, options: PooledOptions, most: int | None) -> list[int]:
        prompt = self._config.prompt if options.instruction is None else options.instruction
        rendered = self._rendered(text, second, prompt, options)
        tokens = self.encode_rendered(rendered, options, most)
        if not self._config.restores_suffix or most is None or len(tokens) < most:
            return tokens
        suffix_of = self._suffix if len(prompt) <= MAX_CACHED_PROMPT else self._template_suffix
        if suffix := suffix_of(second is None, prompt):
            tokens[-len(suffix) :] = suffix[-len(tokens) :]
        return tokens

    def encode_rendered(self, text: MarkedText, options: PooledOptions, most: int | None) -> list[int]:
        """The tokens of a rendered conversation that are kept."""
        adds = bool(options.add_special_tokens)
        if most is None:
            return self._tokenizer.encode(text, add_special_tokens=adds)
        starts = self._cuts_start(options)
        tokens, _is_whole = self._tokenizer.encode_part(text, most, from_end=starts, add_special_tokens=adds)
        return self.cut(tokens, options, most)

    def _rendered(self, text: str, second: str | None, prompt: str, options: PooledOptions) -> MarkedText:
        variables = {"add_generation_prompt": False, **self._config.template_kwargs}
        template = self._tokenizer.chat_template
        if options.instruction is not None and template is not None and "instruction" in template.variables:
            variables["instruction"] = options.instruction
        return self._tokenizer.render_chat(_messages(self._config, text, second, prompt), **variables)

    def _template_suffix(self, is_single: bool, prompt: str) -> list[int]:
        """The tokens that the template writes behind the texts."""
        options = PooledOptions()
        first, other = (
            self._tokenizer.encode(
                self._rendered(filler, None if is_single else filler, prompt, options), add_special_tokens=False
            )
            for filler in FILLERS
        )
        count = 0
        while count < min(len(first), len(other)) and first[-1 - count] == other[-1 - count]:
            count += 1
        return first[len(first) - count :] if count < min(len(first), len(other)) else []
