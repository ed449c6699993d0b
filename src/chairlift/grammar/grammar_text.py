"""Translation of structured outputs to llguidance's grammar language."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn
from urllib.parse import quote

from chairlift.errors import RequestError
from chairlift.grammar.exact_schema import json_symbol
from chairlift.grammar.followed_schema import ANNOTATED, FollowedSchema
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import Reasoning, StructuredOutputs

JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON is written on one line, with at most one space after a colon or a comma. If white space were free, a model could
generate it until the length limit. `lenient` would ignore unsupported keywords."""

LARK_JSON_OPTIONS: Final = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
"""llguidance's own options, for `%json` in a grammar of the request."""

ASCII_CLASSES: Final = "dws"
r"""The classes \d, \w and \s match ASCII only, as in JSON schemas. Unicode has 760 digits, and a model would use
them."""

NAME_CHARACTERS: Final = "$.-_~[]"
"""The characters of names in the header `x-chairlift-ignored` that need no escapes, besides letters and digits."""

IGNORED_ATTRIBUTE: Final = re.compile(r"^[ \t]*[A-Za-z_]\w*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
ANSWER: Final = "answer"
"""The name of the grammar of the constraint, to which the grammar of tool calls is an alternative."""

CALLS: Final = "calls"
RELAXABLE: Final = re.compile(r"^// relaxable (.+)\n(\w+): (%json .+|%lark \{\n(?:.+\n)*?\})$", re.MULTILINE)
"""A rule of the grammar of tool calls with the schema of a tool that is not strict."""


def grammar_text(constraint: StructuredOutputs) -> str:
    """Return a constraint without a schema as the text of a grammar for `LLMatcher`, without compiling it.

    Raises:
        RequestError: the constraint uses a feature that is not supported.
        ValueError: llguidance cannot translate the regular expression.
    """
    from llguidance import LLMatcher, regex_to_lark

    if constraint.regex is not None:
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.regex, ASCII_CLASSES)}/")
    if constraint.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.choice)))
    if constraint.kind == "calls":
        return LLMatcher.grammar_from_lark(constraint.calls or "")
    assert constraint.grammar is not None, "a schema has its own function"
    return LLMatcher.grammar_from_lark(_with_exact_numbers(_lark(constraint, constraint.grammar)))


def _json_grammar(constraint: StructuredOutputs) -> tuple[str, list[str]]:
    """The grammar of a schema, and the names of what it does not follow. Raises ValueError if a number would change."""
    from llguidance import LLMatcher

    assert constraint.json is None or isinstance(constraint.json, str), "StructuredOutputs keeps schemas as text"
    schema = {"type": "object"} if constraint.json is None else json.loads(constraint.json)
    unfollowed = ANNOTATED if constraint.has_annotations else frozenset()
    followed = FollowedSchema(schema, unfollowed, is_arguments=False)
    symbol = json_symbol(followed.schema, _json_options(constraint))
    field = "response_format" if constraint.has_annotations else "structured_outputs"
    left_out = [f"{field}.{quote(path, safe=NAME_CHARACTERS)}" for path in followed.left_out]
    if symbol.startswith("%lark"):
        return LLMatcher.grammar_from_lark(f"start: {symbol}"), left_out
    return LLMatcher.grammar_from_json_schema(symbol.removeprefix("%json ")), left_out


def complete_grammar(constraint: StructuredOutputs, tokenizer: Callable[[], Tokenizer]) -> tuple[str, list[str]]:
    """Return the grammar of a whole answer: that of the constraint, or tool calls instead, and reasoning before it.

    The second value names the parts of the schema of the answer that the grammar does not follow.

    The calls stand beside the answer, unless they refer to it. The reasoning is `opening TEXT closing`, where TEXT ends
    at the first closing marker. A marker that is one special token is matched as such, since no text can spell it.

    Raises:
        RequestError, ValueError: as `grammar_text`.
    """
    is_json = constraint.kind in ("json", "json_object")
    text, left_out = _json_grammar(constraint) if is_json else (grammar_text(constraint), [])
    has_alternative = constraint.calls is not None and constraint.kind != "calls"
    if constraint.reasoning is None and not has_alternative:
        return text, left_out
    if is_json and not text.startswith("start:"):
        answer = json.loads(text)["grammars"]
    else:
        answer = [{"lark_grammar": text}]
    answer[0]["name"] = ANSWER
    body = f"@{ANSWER}"
    if has_alternative:
        answer.append({"name": CALLS, "lark_grammar": constraint.calls})
        body = f"@{CALLS}" if f"@{ANSWER}" in (constraint.calls or "") else f"(@{ANSWER} | @{CALLS})"
    rules = [f"start: {body}"]
    if constraint.reasoning is not None:
        rules = _reasoning_rules(constraint.reasoning, tokenizer(), body)
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *answer]}), left_out


def _reasoning_rules(reasoning: Reasoning, tokenizer: Tokenizer, body: str) -> list[str]:
    opening, closing = marker_symbol(reasoning.opening, tokenizer), marker_symbol(reasoning.closing, tokenizer)
    limit = reasoning.max_tokens
    thoughts = f"({opening})? rest" if reasoning.is_inside else f"({opening} rest){'?' * (limit is None)}"
    rules = [f"start: {thoughts} {body}", "TEXT: /(.|\\n)*/", "BREAK: /\\n*/"]
    head, *tail = (re.escape(each).replace("/", "\\/") for each in reasoning.closing)
    beginning = f"{head}{''.join(f'({each}' for each in tail[:-1])}{')?' * (len(tail) - 1)}"
    thought = "TEXT" if closing.startswith("<[") else f"(/[^{head}]+/ | /{beginning}/)*"
    attribute = "" if limit is None else f"[max_tokens={limit}]"
    return [*rules, f"rest: thoughts {closing} BREAK", f"thoughts{attribute}: {thought}"]


def marker_symbol(text: str, tokenizer: Tokenizer) -> str:
    """Return a marker as symbols of Lark: of the special token that it is, or of those in it and the text between."""
    tokens = tokenizer.special_tokens_in(text)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return " ".join(f"<[{tokenizer.token_to_id(p)}]>" if p in tokens else json.dumps(p) for p in parts if p)


def reject(constraint: StructuredOutputs, problem: str) -> NoReturn:
    """Raise a RequestError that names the field of the constraint and the problem."""
    name = f"structured_outputs.{constraint.kind if constraint.calls is None else 'calls'}"
    raise RequestError(f"{name} {problem}", name)


def _json_options(constraint: StructuredOutputs) -> dict[str, Any]:
    if constraint.disable_any_whitespace:
        return {**JSON_OPTIONS, "item_separator": ",", "key_separator": ":"}
    if constraint.whitespace_pattern is not None:
        separators = {"item_separator": ",", "key_separator": ":"}
        return {**JSON_OPTIONS, **separators, "whitespace_pattern": constraint.whitespace_pattern}
    return JSON_OPTIONS


def _lark(constraint: StructuredOutputs, grammar: str) -> str:
    """Return the grammar unchanged if it is Lark, or translated if it is GBNF, the BNF dialect of llama.cpp."""
    if IGNORED_ATTRIBUTE.search(grammar):
        reject(constraint, "sets the temperature of a rule, which is not supported. Set temperature in the request.")
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(grammar)
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        reject(constraint, f"is not valid GBNF: {' '.join(str(error).split())}")


def _with_exact_numbers(lark: str) -> str:
    """A grammar in Lark in which schemas with large numbers are exact. Raises ValueError if a number would change."""
    written, at = "", 0
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):  # The compiler has a message for it.
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
            given = schema.pop("x-guidance", {})
            if not isinstance(given, dict):
                raise ValueError(f"x-guidance must be an object of options, got {given!r:.100}")
            options = {**LARK_JSON_OPTIONS, **given}
            if found.start() >= at and (symbol := json_symbol(schema, options)).startswith("%lark"):
                written, at = f"{written}{lark[at : found.start()]}{symbol}", end
    return written + lark[at:]


def relax_calls(calls: str, can_compile: Callable[[str], bool]) -> tuple[str, list[str]]:
    """Replace each relaxable schema that cannot be compiled by any object.

    Args:
        can_compile: whether a Lark grammar can be compiled.

    Returns:
        The grammar of the calls, and what was left out, as names for `x-chairlift-ignored`.
    """
    ignored: list[str] = []

    def replacement(found: re.Match[str]) -> str:
        name, rule, schema = found.groups()
        if can_compile(f"start: {schema}"):
            return found[0]
        ignored.append(f"tools.{name}.parameters")
        return f'{rule}: %json {{"type": "object"}}'

    return RELAXABLE.sub(replacement, calls), ignored
