"""Grammars of answers that think first."""

from __future__ import annotations

import json
from typing import Final

from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs

ANSWER: Final = "answer"


def after_reasoning(constraint: StructuredOutputs, grammar: str, tokenizer: Tokenizer) -> str:
    """The grammar of a constraint with reasoning, in llguidance's own form: `opening TEXT closing`, where TEXT ends at
    the first closing, and then `grammar`.

    What is a special token of this tokenizer no text can spell, so it stands for itself.
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
