"""Grammars that make an answer consist of tool calls, or its calls follow the schemas of their tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

from chairlift.errors import RequestError
from chairlift.grammar.exact_schema import json_symbol
from chairlift.grammar.followed_schema import FollowedSchema
from chairlift.grammar.grammar_text import JSON_OPTIONS, NAME_CHARACTERS
from chairlift.server.protocol.tools import FunctionTool
from chairlift.server.tools.answer_formats import CHANNEL, FORCED_CALLS, MESSAGE, START, CallFormat
from chairlift.structured_outputs import StructuredOutputs

NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
COLON: Final = "/: ?/"
COMMA: Final = "/, ?/"
SPACE: Final = "SPACE: /[ \\n]{0,2}/"
TEXT: Final = "TEXT: /(.|\\n)*/"
OTHER: Final = "OTHER: /\\s*/ | /\\s*[^\\s{\\[](.|\\n)*/"  # Text that is no call where calls need no opening.


class CallGrammar:
    """Writes grammars in llguidance's dialect of Lark for the calls of some tools. Raises RequestError if the schema of
    a strict tool cannot be followed.

    A schema is a separate document, whose references are resolved by the rules of JSON Schema. A tool that is not
    strict has a rule that the compiler may relax (see `grammar_text.relax_calls`).

    Args:
        is_parallel: permits more than one call.

    Attributes:
        ignored: the parts of the schemas that the grammar does not follow, as names for `x-chairlift-ignored`.
    """

    def __init__(self, tools: list[FunctionTool], is_parallel: bool) -> None:
        self.ignored: list[str] = []
        self._names = [tool.function.name for tool in tools]
        self._is_parallel = is_parallel
        self._schemas = [line for index, tool in enumerate(tools) for line in self._schema_rule(index, tool)]

    def arguments(self) -> str:
        """The arguments of the first tool."""
        return "\n".join(["start: arguments0", *self._schemas])

    def json_list(self) -> str:
        return self._grammar([f"start: {self._list()}"], FORCED_CALLS.keys)

    def in_format(
        self, form: CallFormat, symbol: Callable[[str], str], has_text: bool, special: tuple[str, ...] = ()
    ) -> str:
        """Calls as JSON after the openings of a format, which is read in every format.

        Args:
            symbol: the symbols of a marker in the grammar: special tokens and strings.
            has_text: permits any text before, between and after the calls.
            special: tags that are permitted in the text if they begin with a special token.
        """
        tags = [tag for tag in map(symbol, special) if tag.startswith("<[")]
        text = f"TEXT (({' | '.join(tags)}) TEXT)*" if tags else "TEXT"
        before = "" if not has_text else "OTHER " if form.is_bare else f"{text} "
        bodies: list[str] = []
        rules: list[str] = []
        for index, marker in enumerate(form.openings):
            is_lazy = before and not symbol(marker).startswith("<[")
            preceding = "TEXT " if is_lazy and tags else before
            rules.append(f"opening{index}{'[lazy]' if is_lazy else ''}: {preceding}{symbol(marker)}")
            bodies.append(f"opening{index} {self._body(form, marker)}")
        closing = f"(SPACE {symbol(form.closing)})?" if form.closing else ""  # Some openings need no closing.
        rules.append(f"opened: ({' | '.join(bodies)}) {closing}")
        several = "+" if self._is_parallel else ""
        starts = [f"opened{several} {text if has_text else ''}"]
        starts += [f"SPACE {self._list() if form.is_list or form.is_python else 'call'}"] if form.is_bare else []
        starts += [before] if before else []
        return self._grammar([f"start: {' | '.join(starts)}", TEXT, OTHER, SPACE, *rules], form.keys)

    def in_channels(self, form: CallFormat, symbol: Callable[[str], str], final: str) -> str:
        """Messages in channels: reasoning and preambles, and then one call or the final message.

        Args:
            final: the rule of the text of the final message.
        """
        assert form.channels is not None
        channel, message = symbol(CHANNEL), symbol(MESSAGE)
        end = f'{symbol(form.channels.ends[0])} {symbol(START)} "assistant"'
        kind = f'SPACE {symbol("<|constrain|>")}? "json"? {message}'
        thought, answer = f"{channel} /analysis|commentary/", f'{channel} "final"'
        if form.tags is not None:
            thought, answer = '" to=self"', '" to=user"'
        rules = ["start: thought* last", TEXT, "SPACE: / ?/", f"thought: {thought} {message} TEXT {end}"]
        messages = [f"message{index}" for index in range(len(self._names))]
        for index, (rule, name) in enumerate(zip(messages, self._names, strict=True)):
            recipient = json.dumps(f" to=functions.{name}")
            header = f'({recipient} {channel} "commentary" | {channel} "commentary" {recipient})'
            call = f"{header} {kind} arguments{index}"
            if form.tags is not None:
                tags = symbol(form.openings[0]), symbol(form.closing or "")
                call = f'{json.dumps(f" to={name}")} {message} {tags[0]} "\\n"? call{index} "\\n"? {tags[1]}'
            rules.append(f"{rule}: {call}")
        rules.append(f"last: {answer} {message} {final} | {' | '.join(messages)}")
        return "\n".join([*rules, *self._schemas]) if form.tags is None else self._grammar(rules, form.keys)

    def _body(self, form: CallFormat, opening: str) -> str:
        if not form.is_list:
            return "SPACE call"
        return self._list().removeprefix('"[" ') if opening.endswith("[") else f"SPACE {self._list()}"

    def _list(self) -> str:
        return f'"[" call {f"({COMMA} call)*" if self._is_parallel else ""} "]"'

    def _grammar(self, rules: list[str], keys: tuple[str, str]) -> str:
        calls = [f"call{index}" for index in range(len(self._names))]
        for index, name in enumerate(self._names):
            named = f"{_quoted(keys[0])} {COLON} {_quoted(name)}"
            rules.append(f'call{index}: "{{" {named} {COMMA} {_quoted(keys[1])} {COLON} arguments{index} "}}"')
        return "\n".join([*rules, f"call: {' | '.join(calls)}", *self._schemas])

    def _schema_rule(self, index: int, tool: FunctionTool) -> list[str]:
        function = tool.function
        followed = FollowedSchema(NO_PARAMETERS if function.parameters is None else function.parameters)
        schema, left_out = followed.schema, followed.left_out
        options = {**JSON_OPTIONS, "lenient": not function.strict, "coerce_one_of": not function.strict}
        try:
            StructuredOutputs(json=schema)
            symbol = json_symbol(schema, options)
        except (RequestError, ValueError) as error:  # It has too many levels or bytes, or a number would change.
            if function.strict and not isinstance(error, RequestError):
                raise RequestError(f"tools: {function.name!r} is strict, but {error}", "tools") from None
            left_out, symbol = ["parameters"], json_symbol({"type": "object"}, options)
        names = [f"tools.{function.name}.{quote(path, safe=NAME_CHARACTERS)}" for path in left_out]
        refused = [name for name, path in zip(names, left_out, strict=True) if not path.endswith("$schema")]
        if refused and function.strict:
            raise RequestError(
                f"tools: {function.name!r} is strict, but parts of its schema cannot be followed: "
                f"{', '.join(refused):.500}. Remove them, or leave out strict",
                "tools",
            )
        self.ignored += names
        rule = f"arguments{index}: {symbol}"
        return [rule] if function.strict else [f"// relaxable {function.name}", rule]


def _quoted(text: str) -> str:
    """A JSON string as a string of Lark."""
    return json.dumps(json.dumps(text))
