"""Translation of structured outputs to llguidance's grammar language."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from chairlift.errors import RequestError
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs

JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON is written on one line, with at most one space after a colon or a comma. If white space were free, a model could
generate it until the length limit. `lenient` would ignore unsupported keywords."""

ASCII_CLASSES: Final = "dws"
r"""The classes \d, \w and \s match ASCII only, as in JSON schemas. Unicode has 760 digits, and a model would use
them."""

IGNORED_ATTRIBUTE: Final = re.compile(r"^[ \t]*[A-Za-z_]\w*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
ANSWER: Final = "answer"


def grammar_text(constraint: StructuredOutputs) -> str:
    """Return a constraint as the text of a grammar for `LLMatcher`, without compiling it.

    Raises:
        RequestError: the constraint uses a feature that is not supported.
        ValueError: llguidance cannot translate the regular expression.
    """
    from llguidance import LLMatcher, regex_to_lark

    if constraint.regex is not None:
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.regex, ASCII_CLASSES)}/")
    if constraint.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.choice)))
    if constraint.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(constraint, constraint.grammar))
    schema = '{"type":"object"}' if constraint.json is None else constraint.json
    assert isinstance(schema, str), "StructuredOutputs keeps schemas as text"
    return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(constraint))  # type: ignore[arg-type]


def grammar_after_reasoning(constraint: StructuredOutputs, grammar: str, tokenizer: Tokenizer) -> str:
    """Return the grammar of `opening TEXT closing` followed by `grammar`, where TEXT ends at the first closing marker.

    A marker that is one special token of the tokenizer is matched as that token, since no text can spell it.

    Args:
        constraint: a constraint with `reasoning`, whose `grammar_text` is `grammar`.
    """
    reasoning = constraint.reasoning
    assert reasoning is not None
    opening, closing = _symbol(reasoning.opening, tokenizer), _symbol(reasoning.closing, tokenizer)
    thoughts = f"{opening}? rest" if reasoning.is_inside else f"({opening} rest)?"
    rules = [f"start: {thoughts} @{ANSWER}", "TEXT: /(.|\\n)*/", "BREAK: /\\n*/"]
    if tokenizer.is_special(reasoning.closing):
        rules.append(f"rest: TEXT {closing} BREAK")
    else:
        rules += ["rest: ended BREAK", f"ended[lazy]: TEXT {closing}"]
    if constraint.kind in ("json", "json_object"):
        answer = json.loads(grammar)["grammars"]
    else:
        answer = [{"lark_grammar": grammar}]
    answer[0]["name"] = ANSWER
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *answer]})


def _symbol(text: str, tokenizer: Tokenizer) -> str:
    return f"<[{tokenizer.token_to_id(text)}]>" if tokenizer.is_special(text) else json.dumps(text)


def reject(constraint: StructuredOutputs, problem: str) -> NoReturn:
    """Raise a RequestError that names the field of the constraint and the problem."""
    name = f"structured_outputs.{constraint.kind}"
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
