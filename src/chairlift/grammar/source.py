"""From a constraint to a grammar in llguidance's own form."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from chairlift.errors import RequestError
from chairlift.structured_outputs import StructuredOutputs

JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
"""Compact JSON on one line, where one space may follow a colon or a comma. Free white space is what models get lost in:
nothing but the length limit ends it. `lenient` would drop the keywords that are not supported."""

ASCII_CLASSES: Final = "dws"
r"""\d, \w and \s are ASCII's, as in JSON schemas: Unicode has 760 digits, and a model draws from all it is given."""

IGNORED_ATTRIBUTE: Final = re.compile(r"^[ \t]*[A-Za-z_]\w*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)


def grammar_text(constraint: StructuredOutputs) -> str:
    """What `LLMatcher` takes; not compiled, and with errors of its own perhaps.

    Raises:
        RequestError: it cannot be written down as a grammar.
    """
    from llguidance import LLMatcher, regex_to_lark

    if constraint.regex is not None:
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.regex, ASCII_CLASSES)}/")
    if constraint.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.choice)))
    if constraint.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(constraint.grammar))
    schema = '{"type":"object"}' if constraint.json is None else constraint.json
    assert isinstance(schema, str), "schemas are kept as text"
    return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(constraint))  # type: ignore[arg-type]


def refuse(constraint: StructuredOutputs, why: str) -> NoReturn:
    """Blame the field that is given."""
    raise RequestError(f"structured_outputs.{constraint.kind} {why}", f"structured_outputs.{constraint.kind}")


def json_rule(schema: dict[str, Any]) -> str:
    """A schema as a rule in a Lark grammar, in the same form as JSON has by itself."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _json_options(constraint: StructuredOutputs) -> dict[str, Any]:
    if constraint.disable_any_whitespace:
        return {**JSON_OPTIONS, "item_separator": ",", "key_separator": ":"}
    if constraint.whitespace_pattern is not None:
        separators = {"item_separator": ",", "key_separator": ":"}
        return {**JSON_OPTIONS, **separators, "whitespace_pattern": constraint.whitespace_pattern}
    return JSON_OPTIONS


def _lark(grammar: str) -> str:
    """The grammar as it is, or translated if it is written in GBNF, llama.cpp's form of BNF."""
    if IGNORED_ATTRIBUTE.search(grammar):
        raise RequestError(
            "structured_outputs.grammar: the temperature of a rule is not supported; set temperature for the request",
            "structured_outputs.grammar",
        )
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(grammar)
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.grammar is no GBNF: {' '.join(str(error).split())}", "structured_outputs.grammar"
        ) from None
