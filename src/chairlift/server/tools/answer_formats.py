"""The delimiters of tool calls and reasoning, which `--tool-call-parser` and `--reasoning-parser` select."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from chairlift.loading.text.chat_template import ChatTemplate
from chairlift.server.tools.literal_scanners import FUNCTION_GEMMA, GEMMA, LiteralSyntax
from chairlift.server.tools.tag_scanner import TagSyntax
from chairlift.structured_outputs import Reasoning

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"


@dataclass(frozen=True, slots=True)
class ChannelSyntax:
    """How an answer is divided into messages, each after a header and MESSAGE. The prompt ends with the role, so that
    an answer begins within a header.

    Attributes:
        beginnings: what the first header may begin with; an answer that begins otherwise is content.
        ends: tokens after which a message is complete. A missing end is followed by the start of the next message.
        call: an expression in the headers of calls, with a group for the name of the tool.
        reasoning: an expression in the headers of other messages that are reasoning.
        final: the header of the answer.
        before_answer: what precedes the text in which stop strings are searched.
    """

    beginnings: tuple[str, ...]
    ends: tuple[str, ...]
    call: str
    reasoning: str
    final: str
    before_answer: Reasoning


HARMONY: Final = ChannelSyntax(
    (START, CHANNEL, "to="),
    ("<|end|>", "<|call|>", "<|return|>", START),
    r"\bto=functions\.([\w.:-]+)",
    r"<\|channel\|>\s*analysis",
    f"{CHANNEL}final{MESSAGE}",
    Reasoning(CHANNEL, f"{CHANNEL}final{MESSAGE}", ends=(CHANNEL + "commentary",)),
)
MUSE: Final = ChannelSyntax(
    (START, MESSAGE, "to="),
    ("<|eom|>", "<|eot|>", START),
    r"\bto=(?!(?:self|user)(?![\w.:-]))([\w.:-]+)",
    r"\bto=self(?![\w.:-])",
    f" to=user{MESSAGE}",
    Reasoning("to=", f"to=user{MESSAGE}", ends=("<atem:function_calls>",)),
)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes tool calls.

    Attributes:
        openings, closing: texts that begin calls, and the text that ends them; None if they end with the answer.
        is_bare: a brace or bracket at the start of an answer begins a call, without an opening.
        named: `name{...}` is a call too: an expression of the text before the brace, with `name` and perhaps `id`.
        literals: `call:name{key:value,...}` is a call too, with values in this syntax.
        is_python: `name(key=value, ...)` is a call too, and `[name(key=value, ...), ...]` a list of calls.
        has_raw_strings: strings of Python may be without escapes.
        tags: a call is a name and tags of its arguments.
        skipped: texts between calls that are no part of them.
        is_list: calls are a list after one opening; otherwise each call has an opening.
        channels: answers consist of messages in channels; see `ChannelParser`.
        has_name_keys: in a call that is JSON, the name of the tool may be the key of its arguments.
        keys: the keys of the name and the arguments in a call that is JSON.
        id_length: the length of call ids that the chat template accepts; None for any length.
    """

    openings: tuple[str, ...]
    closing: str | None = None
    is_bare: bool = False
    named: str | None = None
    literals: LiteralSyntax | None = None
    is_python: bool = False
    has_raw_strings: bool = False
    tags: TagSyntax | None = None
    skipped: tuple[str, ...] = ()
    is_list: bool = False
    channels: ChannelSyntax | None = None
    has_name_keys: bool = False
    keys: tuple[str, str] = ("name", "arguments")
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return self.openings if self.closing is None else (*self.openings, self.closing)


def _attribute_tags(argument: str, call: str, rest: str = "") -> TagSyntax:
    """Tags whose names are attributes: `<argument name="key">value</argument>` within a call.

    Args:
        rest: an expression of what follows the name of an argument and its quote.
    """
    value_end = rf"</{argument}>(?=\s*(?:<{argument} name=|</{call}>))"
    return TagSyntax('">', rf'<{argument} name="([^"]{{1,256}})"{rest or ">"}', value_end, f"</{call}>")


NAMED: Final = r"(?P<name>[A-Za-z0-9_.:-]{1,128})(?:\[CALL_ID\]\w{1,32})?(?:\[ARGS\])?\s*(?={)"
DEEPSEEK: Final = r"(?:function<｜tool▁sep｜>)?(?P<name>[\w.:-]{1,128})(?:<｜tool▁sep｜>|\s*```json)\s*(?={)"
KIMI: Final = r"(?P<id>(?:functions\.)?(?P<name>[\w.:-]{1,128}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?={)"
SOLAR: Final = r"(?P<id>\w{1,64})?<\|tool_call:name\|>(?P<name>[\w.:-]{1,128})<\|tool_call:args\|>\s*(?={)"
QWEN_END: Final = r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</(?:seed:)?tool_call>))"
QWEN_TAGS: Final = TagSyntax(">", r"<parameter=([^>\n]{1,256})>\n?", QWEN_END, "</function>")
SEED_TAGS: Final = QWEN_TAGS._replace(key="<parameter=([^>\n]{1,256})>", value_end=QWEN_END.removeprefix(r"\n?"))
GLM_END: Final = r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"
GLM_TAGS: Final = TagSyntax(
    r"(?=\s*<)", r"<arg_key>([^<]{1,256})</arg_key>\s{0,80}<arg_value>", GLM_END, "</tool_call>"
)
HUNYUAN_TAGS: Final = TagSyntax(
    r"\s*(?:<tool_sep:opensource>|(?=<arg_key:|</tool_call:))",
    r"<arg_key:opensource>([^<]{1,256})</arg_key:opensource>\s{0,80}<arg_value:opensource>",
    r"</arg_value:opensource>(?=\s*(?:<arg_key:opensource>|</tool_call:opensource>))",
    "</tool_call:opensource>",
)
MINIMAX_TAGS: Final = _attribute_tags("parameter", "invoke")
MINICPM_TAGS: Final = _attribute_tags("param", "function", r">(?P<cdata><!\[CDATA\[)?")
ATEM_TAGS: Final = _attribute_tags("atem:parameter", "atem:invoke")
DSML_TAGS: Final = _attribute_tags("｜DSML｜parameter", "｜DSML｜invoke", ' string="(?P<type>true|false)">')
MINIMAX_MARK: Final = "]<]minimax[>["
MINIMAX_M3_TAGS: Final = TagSyntax(
    '">',
    r"\]<\]minimax\[>\[<([^\s</>]+)>",
    r"\]<\]minimax\[>\[<(/?)[^\s<>]+>",
    f"{MINIMAX_MARK}</invoke>",
    is_nested=True,
)
KIMI_K3_TAGS: Final = TagSyntax(
    r'"[^<]*<\|sep\|>',
    r'<\|open\|>argument key="([^"]{1,256})" type="(?P<type>\w{1,80})"<\|sep\|>',
    r"<\|close\|>argument<\|sep\|>(?=\s*<\|(?:open\|>argument|close\|>call))",
    "<|close|>call<|sep|>",
)
SOLAR_TAGS: Final = TagSyntax(
    r"\s*(?=<)",
    r"<\|tool_arg:start\|>([^<]{1,256})<\|tool_arg:value\|>",
    r"<\|tool_arg:end\|>(?=\s*<\|tool_(?:arg:start|call:end)\|>)",
    "<|tool_call:end|>",
)
DEEPSEEK_MARKS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
KIMI_MARKS: Final = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")

TOOL_CALL_FORMATS: Final[dict[str, CallFormat]] = {
    "hermes": CallFormat(("<tool_call>",), "</tool_call>"),
    "llama3_json": CallFormat(("<|python_tag|>",), is_bare=True, keys=("name", "parameters")),
    "mistral": CallFormat(("[TOOL_CALLS]",), named=NAMED, is_list=True, id_length=9),
    "granite": CallFormat(("<|tool_call|>", "<tool_call>"), is_bare=True, is_list=True),
    "phi4_mini_json": CallFormat(("<|tool_call|>", "functools["), "<|/tool_call|>", is_list=True),
    "olmo3": CallFormat(("<function_calls>",), "</function_calls>", is_python=True),
    "gemma4": CallFormat(("<|tool_call>",), "<tool_call|>", literals=GEMMA),
    "openai": CallFormat((CHANNEL,), channels=HARMONY),
    "muse_glimmer": CallFormat(
        ("<atem:function_calls>", '<atem:invoke name="'), "</atem:function_calls>", tags=ATEM_TAGS, channels=MUSE
    ),
    "pythonic": CallFormat(("```tool_code", "```json"), "```", is_bare=True, is_python=True),
    "qwen3_coder": CallFormat(("<tool_call>", "<function="), "</tool_call>", tags=QWEN_TAGS),
    "glm45": CallFormat(("<tool_call>",), "</tool_call>", tags=GLM_TAGS),
    "minimax_m2": CallFormat(("<minimax:tool_call>", '<invoke name="'), "</minimax:tool_call>", tags=MINIMAX_TAGS),
    "seed_oss": CallFormat(("<seed:tool_call>", "<function="), "</seed:tool_call>", tags=SEED_TAGS),
    "deepseek_v3": CallFormat(
        DEEPSEEK_MARKS, "<｜tool▁calls▁end｜>", named=DEEPSEEK, skipped=("```", "<｜tool▁call▁end｜>")
    ),
    "deepseek_v32": CallFormat(
        ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="'), "</｜DSML｜function_calls>", tags=DSML_TAGS
    ),
    "deepseek_v4": CallFormat(
        ("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'), "</｜DSML｜tool_calls>", tags=DSML_TAGS
    ),
    "minimax_m3": CallFormat(
        (f"{MINIMAX_MARK}<tool_call>", f'{MINIMAX_MARK}<invoke name="'),
        f"{MINIMAX_MARK}</tool_call>",
        tags=MINIMAX_M3_TAGS,
    ),
    "kimi_k3": CallFormat(("<|open|>tools<|sep|>", '<|open|>call tool="'), "<|close|>tools<|sep|>", tags=KIMI_K3_TAGS),
    "hy_v3": CallFormat(
        ("<tool_calls:opensource>", "<tool_call:opensource>"), "</tool_calls:opensource>", tags=HUNYUAN_TAGS
    ),
    "solar_open": CallFormat(
        ("<|tool_calls|>", "<|tool_call:begin|>"), "<|calls|>", named=SOLAR, skipped=("<|tool_call:end|>",)
    ),
    "solar_open2": CallFormat(("<|tool_call:start|>",), "<|tool_call:end|>", tags=SOLAR_TAGS),
    "gigachat3": CallFormat(("<|message_sep|>\n\nfunction call<|role_sep|>", "<|function_call|>"), "<|message_sep|>"),
    "apertus": CallFormat(("<|tools_prefix|>",), "<|tools_suffix|>", is_list=True, has_name_keys=True),
    "kimi_k2": CallFormat(KIMI_MARKS, "<|tool_calls_section_end|>", named=KIMI, skipped=("<|tool_call_end|>",)),
    "functiongemma": CallFormat(("<start_function_call>",), "<end_function_call>", literals=FUNCTION_GEMMA),
    "lfm2": CallFormat(
        ("<|tool_call_start|>",), "<|tool_call_end|>", is_python=True, has_raw_strings=True, is_list=True
    ),
    "minicpm5": CallFormat(('<function name="',), "</function>", tags=MINICPM_TAGS),
    "cohere_command3": CallFormat(
        ("<|START_ACTION|>",), "<|END_ACTION|>", is_list=True, keys=("tool_name", "parameters")
    ),
    "hunyuan_a13b": CallFormat(("<tool_calls>",), "</tool_calls>", is_list=True),
    "nemotron_json": CallFormat(("<TOOLCALL>",), "</TOOLCALL>", is_list=True),
}
"""vLLM's parsers have the same names; `solar_open` is that of Upstage's vLLM. docs/guide/model-formats.md lists the
models of each."""

CALL_MARKS: Final = (
    (("<tool_sep",), "hy_v3"), (("<seed:tool_call>",), "seed_oss"), (("<|START_ACTION|>",), "cohere_command3"),
    (("<function=", "<parameter="), "qwen3_coder"), (("<arg_key>",), "glm45"), (("<|tool_call>call:",), "gemma4"),
    (("<minimax:tool_call>",), "minimax_m2"), (("<tool_calls>",), "hunyuan_a13b"), (("<function_calls>",), "olmo3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"), (("<|im_system|>",), "kimi_k2"), (("[TOOL_CALLS]",), "mistral"),
    (("<start_function_call>",), "functiongemma"), (("<|tool_list_start|>",), "lfm2"), (("<|channel|>",), "openai"),
    (("<|tool_call_start|>",), "lfm2"), (("<|tool|>",), "phi4_mini_json"), (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"), (("[func_name1(",), "pythonic"), (("```tool_code",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"), (("ipython",), "llama3_json"), (("<|tool_call_begin|>",), "kimi_k2"),
    (("List of tools: [", "<|im_start|>"), "lfm2"), (("<TOOLCALL>",), "nemotron_json"),
    (('<function name="',), "minicpm5"), (("<atem:function_calls>",), "muse_glimmer"),
    (("function_calls>", "｜DSML｜"), "deepseek_v32"), (("tool_calls>", "｜DSML｜"), "deepseek_v4"),
    (("]<]minimax[>[",), "minimax_m3"), (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_call:begin|>",), "solar_open"), (("<|tool_arg:start|>",), "solar_open2"),
    (("<|role_sep|>",), "gigachat3"), (("<|tools_prefix|>",), "apertus"), (("<tool_call>",), "hermes"),
)  # fmt: skip
"""Texts that all occur in a chat template, and the parser that they select. The first entry that applies counts."""

FORCED_CALLS: Final = CallFormat((), is_bare=True)
"""The format of an answer that is constrained to a JSON list of calls."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        opening, closing: the tags around the reasoning.
        is_implied: answers begin with reasoning even without the opening tag.
        label: the text after the opening tag that is not part of the reasoning.
        answer: the tags around the text after the reasoning, if any. An empty opening tag needs no text.
        special: tags that are special tokens, which are no part of an answer with or without reasoning.
        has_bare_answers: an answer without reasoning has no tags.
    """

    opening: str
    closing: str
    is_implied: bool = False
    label: str = ""
    answer: tuple[str, str] | None = None
    special: tuple[str, ...] = ()
    has_bare_answers: bool = False


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
    "olmo3": ReasoningFormat("<think>", "</think>", is_implied=True),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "granite33": ReasoningFormat("<think>", "</think>", answer=("<response>", "</response>"), has_bare_answers=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", answer=("<answer>", "</answer>")),
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        special=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>", special=("</mm:think>",)),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        special=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "hy_v3": ReasoningFormat("<think:opensource>", "</think:opensource>"),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "ernie45": ReasoningFormat("<think>", "</think>", answer=("<response>", "</response>"), has_bare_answers=True),
    "solar_open": ReasoningFormat(
        "<|think|>",
        "<|end|>",
        special=("<|begin|>assistant<|content|>", "<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    "solar_open2": ReasoningFormat("<|think:start|>", "<|think:end|>"),
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", answer=("", "[END FINAL RESPONSE]")
    ),
}
"""vLLM's parsers have the same names, as above; `apriel` is SGLang's."""

REASONING_MARKS: Final = (
    (("[BEGIN FINAL RESPONSE]",), "apriel"),
    (("</think>", "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>"), "deepseek_r1"),
    (("</think>", "<response></response>"), "granite33"),
    (("</think>", "<response>", "</response>"), "ernie45"),
    (("</think>", "</answer>"), "hunyuan_a13b"),
    (("<｜hy_Assistant｜>",), "hunyuan_a13b"),
    (("<tool_sep",), "hy_v3"),
    (("</think>",), "qwen3"),
    (("</seed:think>",), "seed_oss"),
    (("<|END_THINKING|>",), "cohere_command3"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("[/THINK]",), "mistral"),
    (("Here is my thought process:",), "granite"),
    (("</mm:think>",), "minimax_m3"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|inner_prefix|>",), "apertus"),
    (("<|think|>", "<|content|>"), "solar_open"),
    (("<|think:start|>",), "solar_open2"),
)
"""As `CALL_MARKS`."""


SUFFIX: Final = ":opensource"
TEMPLATE_SUFFIX: Final = re.compile(r"""\bHYTK\s*=\s*["']([:\w]*)["']|<tool_sep([:\w]*)>""")
"""Where a chat template of Hunyuan has the suffix of its tags, which differs between models."""


def tool_call_format(name: str, chat_template: str | None) -> CallFormat | None:
    """The format of this name; `auto` derives it from what the chat template of the model writes, and is None if that
    indicates none."""
    if name == "auto":
        name = _name_from_template(CALL_MARKS, chat_template) or ""
    form, suffix = TOOL_CALL_FORMATS.get(name), _suffix(chat_template)
    if name != "hy_v3" or form is None or form.tags is None or suffix == SUFFIX:
        return form
    openings = tuple(opening.replace(SUFFIX, suffix) for opening in form.openings)
    head, key, value_end, end = (part.replace(SUFFIX, suffix) for part in form.tags[:4])
    tags = TagSyntax(head, key, value_end, end)
    return replace(form, openings=openings, closing=(form.closing or "").replace(SUFFIX, suffix), tags=tags)


def reasoning_format(name: str, template: ChatTemplate | None) -> ReasoningFormat | None:
    """The format of this name; `auto` derives it from the tags in the chat template of the model, `none` is None."""
    if name == "auto" and template is not None:
        name = _name_from_template(REASONING_MARKS, template.text) or "none"
        if name == "deepseek_r1" and not template.variables.isdisjoint(("thinking", "enable_thinking")):
            name = "qwen3"
    form = REASONING_FORMATS.get(name)
    if name != "hy_v3" or form is None or template is None:
        return form
    suffix = _suffix(template.text)
    return replace(form, opening=form.opening.replace(SUFFIX, suffix), closing=form.closing.replace(SUFFIX, suffix))


def _suffix(chat_template: str | None) -> str:
    found = TEMPLATE_SUFFIX.search(chat_template or "")
    return SUFFIX if found is None else found[1] or found[2] or ""


def _name_from_template(marks: Iterable[tuple[tuple[str, ...], str]], chat_template: str | None) -> str | None:
    return next((name for texts, name in marks if all(text in (chat_template or "") for text in texts)), None)
