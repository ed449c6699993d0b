"""Checks of a chat template at startup: its special tokens must be encoded as tokens, and content must not be, and an
answer must end with the token that ends a turn in the template."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.loading.text.marked_text import MarkedText, template_spans, unmarked
from chairlift.loading.text.tokenizer import Tokenizer

SENTINEL: Final = "qzvx"
"""A string that does not occur in templates, by which the probe's content is found in a prompt."""
MESSAGE_MARKS: Final = ("<|channel|>", "<|open|>", "<|role_sep|>", "<|begin|>assistant")
"""Texts of prompts in which a turn consists of several messages: of gpt-oss, Kimi K3, GigaChat 3 and Solar Open."""

MAX_NAMED: Final = 5
logger = logging.getLogger(__name__)

ProbeConversation = tuple[list[dict[str, Any]], dict[str, Any]]
"""Messages and further variables of a template."""


def log_template_problems(template: ChatTemplate, tokenizer: object) -> None:
    """Log a warning for each problem of a template. An engine without a tokenizer is not checked."""
    for problem in template_problems(template, tokenizer) if isinstance(tokenizer, Tokenizer) else ():
        logger.warning("chat template: %s", problem)


def add_turn_ends(end_ids: tuple[int, ...], tokenizer: Tokenizer, model: str) -> tuple[int, ...]:
    """Return the end tokens of a model with the EOS token of the tokenizer and the end of a turn in the template.

    Args:
        end_ids: the end tokens of the configuration. If others are added, a warning names all of them.
    """
    found = dict.fromkeys((tokenizer.eos_token_id, end_of_turn(tokenizer)))
    added = [token_id for token_id in found if token_id is not None and token_id not in end_ids]
    if added:
        ends, known = (", ".join(map(repr, map(tokenizer.id_to_token, ids))) for ids in (added, end_ids))
        logger.warning(
            f"{model}: its tokenizer or chat template ends a turn with {ends}, but its configuration with "
            f"{known or 'no token'}: an answer ends with any of them"
        )
    return (*end_ids, *added)


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the first added token after the text of the assistant in a prompt, or None if there is none.

    Some models have none, because a turn consists of several messages, each with an end (`<|end|>` of gpt-oss).
    """
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
    try:
        prompt = unmarked(tokenizer.render_chat(turns, add_generation_prompt=False))
    except RequestError:
        return None
    has_messages = any(mark in prompt for mark in MESSAGE_MARKS)
    after = prompt.rpartition(SENTINEL)[2] if SENTINEL in prompt and not has_messages else ""
    ids = tokenizer.encode(after, add_special_tokens=False)
    return next((i for i in ids if i in tokenizer.guard.guarded_tokens.values()), None)


def template_problems(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Return the problems in the prompts of probe conversations, as sentences."""
    spellings = sorted(tokenizer.guard.guarded_tokens)
    if not spellings:
        return []
    hostile = SENTINEL + SENTINEL.join(["", *spellings, ""])
    problems: list[str] = []
    for prompt in _rendered(template, "x"):
        problems += _lost_tokens(prompt, tokenizer)
    for prompt in _rendered(template, hostile):
        problems += _content_as_template(prompt)
    return list(dict.fromkeys(problems))


def _rendered(template: ChatTemplate, content: str) -> Iterator[MarkedText]:
    """Yield the prompts of the conversations that the template accepts."""
    for messages, variables in _conversations(content, "tools" in template.variables):
        try:
            yield template.render(messages, **variables)
        except RequestError as error:
            logger.debug("chat template: a probe conversation was rejected: %s", error)


def _lost_tokens(prompt: MarkedText, tokenizer: Tokenizer) -> list[str]:
    """Return a problem if special tokens of an ordinary conversation are not marked as template text."""
    before = tokenizer.encode(unmarked(prompt), add_special_tokens=False)
    after = tokenizer.guard.encode_with_aliases(prompt)
    if before == after:
        return []
    lost = [i for i in tokenizer.guard.guarded_tokens.values() if before.count(i) > after.count(i)]
    names = ", ".join(repr(tokenizer.id_to_token(i)) for i in lost[:MAX_NAMED]) or "some tokens"
    return [
        f"{names} of the template are encoded as plain text, because the template computes them with an operation that "
        "does not distinguish template text and content (such as a number in the token, encode, safe, or a format "
        "specification). Write them as string constants, or start with --allow-special-tokens-in-content, which also "
        "encodes special tokens in messages"
    ]


def _content_as_template(prompt: MarkedText) -> list[str]:
    plain = unmarked(prompt)
    leaked = [plain[start:end] for start, end in template_spans(prompt) if SENTINEL in plain[start:end]]
    return [f"content of messages counts as template text ({text[:80]!r}); report this template" for text in leaked]


def _conversations(content: str, has_tools: bool) -> Iterator[ProbeConversation]:
    """Yield conversations with the content in every field. A template may reject some of them."""
    system = {"role": "system", "content": content}
    user = {"role": "user", "content": content, "name": content}
    assistant = {"role": "assistant", "content": content, "reasoning_content": content}
    yield [user], {}
    yield [user, assistant, user], {}
    yield [system, user, assistant, user], {"documents": [{"title": content, "text": content}]}
    if has_tools:
        function = {"name": content, "description": content, "parameters": {"type": "object", "properties": {}}}
        call = {"id": "abcdefghi", "type": "function", "function": {"name": content, "arguments": {content: content}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": content, "name": content, "tool_call_id": "abcdefghi"}
        yield [user, calling, result, user], {"tools": [{"type": "function", "function": function}]}
        yield [user, calling, result], {"tools": [{"type": "function", "function": function}]}
