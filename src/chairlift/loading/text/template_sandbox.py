"""TemplateEnvironment: a Jinja2 sandbox with bounded loops and output, which is marked as template text or content.

String constants and the text between tags of a template are template text. Everything else is content, and so is the
result of an operation that `MarkedText` does not handle.

Loops, calls, repetitions and the output of a template are bounded. Other single operations, such as `center` with a
huge width, are not: a template can use up the memory of the process, so it must come from the operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from chairlift.loading.text.marked_text import MarkedText, is_template_text, join_marked, template_text
from chairlift.loading.text.written_object import json_text

CPU_SECONDS: Final = 2.0
"""CPU time of the thread after which a render begins no further iteration of a loop and no further call."""

MAX_OUTPUT_CHARACTERS: Final = 16 << 20
"""Characters of a prompt, and of each text that a template joins from several."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. A prompt contains only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Literals(dict[str, MarkedText]):
    """The marked string constants of templates, which are created on first use."""

    def __missing__(self, text: str) -> MarkedText:
        self[text] = marked = template_text(text)
        return marked


class _TimedContext(Context):
    """The variables of one render, and the CPU time of the thread at which it is stopped."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline = time.thread_time() + CPU_SECONDS

    def check_deadline(self) -> None:
        if time.thread_time() > self._deadline:
            raise jinja2.TemplateError(f"it was stopped after {CPU_SECONDS:g} s of CPU time")


@pass_context
def until_deadline(context: _TimedContext, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of a loop until the render has used up its CPU time."""
    for value in values:
        context.check_deadline()
        yield value


class _MarkingGenerator(CodeGenerator):
    """Generates code that marks string constants and bounds loops, and evaluates no expression at compile time."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for loop in list(node.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "until_deadline", [], [], None, None, lineno=loop.lineno)
        super().visit_Template(node, frame)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.literals[{node.value!r}]")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_TemplateData(node, frame)
        else:
            self.write(f"environment.literals[{node.data!r}]")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.literals[{super()._output_const_repr(group)}]"

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _MarkedFormatter(SandboxedFormatter):
    """`str.format` for marked format strings. Fields without a format specification keep their marks."""

    def marked(self, layout: MarkedText, values: Sequence[Any], named: Mapping[str, Any]) -> MarkedText:
        """Format the values. The whole result is content if the layout contains content."""
        text = MarkedText(self.vformat(layout, values, named))
        if not is_template_text(layout):
            return text
        pieces: list[str] = []
        number = 0
        for literal, name, specification, conversion in self.parse(layout):
            pieces.append(template_text(literal))
            if name is None:
                continue
            if not name:
                name, number = str(number), number + 1
            pieces.append(self._field(name, specification or "", conversion, values, named))
        joined = join_marked(pieces)
        return joined if joined == text else text

    def _field(
        self, name: str, specification: str, conversion: Any, values: Sequence[Any], named: Mapping[str, Any]
    ) -> str:
        value, _ = self.get_field(name, values, named)
        value = self.convert_field(value, conversion)
        if isinstance(value, MarkedText) and not specification:
            return value
        return str(self.format_field(value, specification))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox with the helper functions of chat templates, which renders MarkedText."""

    code_generator_class = _MarkingGenerator
    context_class = _TimedContext
    intercepted_binops = frozenset({"*"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> MarkedText:
        """Join the pieces of an output.

        Raises:
            jinja2.TemplateError: They have more than `MAX_OUTPUT_CHARACTERS` characters.
        """
        return join_marked(_limited(pieces))

    def __init__(self) -> None:
        extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.literals = _Literals()
        self.filters |= {"tojson": to_json, "join": join_values, "until_deadline": until_deadline}
        helpers: dict[str, Callable[..., Any]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.globals |= helpers

    def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
        assert isinstance(context, _TimedContext)
        context.check_deadline()
        return super().call(context, function, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for repeated, count in ((left, right), (right, left)):
            is_repetition = isinstance(repeated, (str, list, tuple)) and isinstance(count, int)
            if is_repetition and len(repeated) * count > MAX_OUTPUT_CHARACTERS:
                raise jinja2.TemplateError(f"it repeats a text or list beyond {MAX_OUTPUT_CHARACTERS} entries")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        layout = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(layout, MarkedText) or value.__name__ != "format":
            return wrapped
        formatter = _MarkedFormatter(self)
        return lambda *values, **named: formatter.marked(layout, values, named)


def _limited(pieces: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > MAX_OUTPUT_CHARACTERS:
            raise jinja2.TemplateError(f"its text has more than {MAX_OUTPUT_CHARACTERS} characters")
        yield piece


def raise_exception(message: str) -> NoReturn:
    """Reject the conversation. Templates call this function with the reason."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> MarkedText:
    """The filter `tojson`, without HTML escapes. Its result is content."""
    return MarkedText(
        json_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


@pass_eval_context
def join_values(
    eval_ctx: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    """The filter `join`, whose result keeps the marks of its parts."""
    separator = MarkedText(d) if type(d) is str else d
    return str(FILTERS["join"](eval_ctx, value, separator, attribute))


def strftime_now(layout: str) -> str:
    """Return the local time in a format of `strftime`."""
    return datetime.now().strftime(layout)
