"""Plans of requests: renders the prompt of a conversation, and selects constraint and parser of the answer."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final

from chairlift.engine.pooling import check_task
from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import ConfigError, RequestError
from chairlift.grammar.grammar_text import ANSWER, marker_symbol
from chairlift.loading.text.chat_template import PROBES, ChatTemplate, TextParts
from chairlift.loading.text.marked_text import TEMPLATE, MarkedText, join_marked, mask_of, template_text, unmarked
from chairlift.loading.text.template_check import log_template_problems
from chairlift.loading.text.template_sandbox import CPU_SECONDS
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.sampling_params import SamplingParams
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.messages import CountTokensRequest, MessagesRequest
from chairlift.server.protocol.responses import ResponsesRequest
from chairlift.server.protocol.tools import FunctionTool, selected_tools
from chairlift.server.protocol.turns import (
    BLANK_LINE,
    adapted_turns,
    leading_system,
    with_one_leading_system,
    with_separate_texts,
    with_single_calls,
)
from chairlift.server.tools.answer_formats import (
    FORCED_CALLS,
    MESSAGE,
    TOOL_CALL_FORMATS,
    CallFormat,
    reasoning_format,
)
from chairlift.server.tools.answer_parser import AnswerParser, NamedToolParser, PlainTextParser
from chairlift.server.tools.call_detection import UNKNOWN_CALLS, call_style, detected_format
from chairlift.server.tools.channel_parser import ChannelParser
from chairlift.server.tools.reasoning_parser import AnswerTagParser, ReasoningParser, SpecialTagParser
from chairlift.server.tools.tag_scanner import ToolKinds, argument_kinds
from chairlift.server.tools.tool_constraints import CallGrammar
from chairlift.server.tools.tool_instructions import (
    TOOL_VARIABLES,
    completed_tool,
    position_of_tool,
    with_described_tools,
    with_tools_in_system_message,
    with_written_calls,
    written_variables,
)
from chairlift.server.tools.tool_parser import ToolParser
from chairlift.structured_outputs import Reasoning, StructuredOutputs

TOOLS_IN_MESSAGE: Final = "'tools' in message"
"""Text of chat templates that read JSON in the field `tools` of the system message, such as Phi-4-mini's."""

TOOL_ROLE: Final = re.compile("""['"]tool['"]""")
"""Text of chat templates that write the results of tools."""

ANY_TOKENS: Final = "start: <[*]>*"  # The grammar of any text, with special tokens, after reasoning with a budget.

REASONING_NAMES: Final = ("reasoning_content", ".thinking", ".tool_plan")
"""Texts of chat templates that read reasoning. The first one in a template is the name of the field that it reads:
`thinking` for gpt-oss and LFM2.5, `tool_plan` for Command R7B."""

Conversation = ChatCompletionRequest | ResponsesRequest | MessagesRequest
"""A body that generates from messages; `to_chat` converts it to the first form."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The prompts and sampling parameters of a request. Plans can be pickled.

    Attributes:
        prompts: the text (None if the request has token ids) and the token ids of each prompt.
        ignored: the fields of the body that have no effect with this model.
    """

    prompts: list[tuple[str | None, list[int]]]
    params: SamplingParams
    ignored: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class ChatPlan(RequestPlan):
    """The plan of a request with a conversation.

    Attributes:
        new_parser: creates a parser for one answer.
        echo: text of the prompt that is returned in front of each answer.
        finishes_with_tool_calls: the finish reason of an answer with tool calls is `tool_calls`.
    """

    new_parser: Callable[[], AnswerParser]
    echo: str
    finishes_with_tool_calls: bool


@dataclass(frozen=True, slots=True)
class _ToolSelection:
    """The tools of one request, and the mode of `selected_tools`. `named` and `required` permit only calls."""

    tools: list[FunctionTool]
    mode: str
    is_parallel: bool

    @classmethod
    def of(cls, body: ChatCompletionRequest) -> _ToolSelection:
        return cls(*selected_tools(body.tools or [], body.tool_choice), body.parallel_tool_calls is not False)

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of calls alone."""
        return self.mode in ("named", "required")

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools that an answer may call."""
        return frozenset(() if self.mode == "none" else (tool.function.name for tool in self.tools))

    @property
    def max_calls(self) -> int | None:
        """The maximum number of calls in an answer, if any."""
        return None if self.is_parallel else 1

    def has_own_calls(self, structure: StructuredOutputs | None) -> bool:
        """Whether the model decides about calls in its own format, and a grammar constrains them."""
        if structure is None:
            return self.mode == "auto" and any(tool.function.strict for tool in self.tools)
        return self.mode == "auto" and structure.kind not in ("regex", "grammar")

    def constraint(
        self,
        structure: StructuredOutputs | None,
        family: CallFormat,
        symbol: Callable[[str], str],
        special: tuple[str, ...],
    ) -> tuple[StructuredOutputs | None, list[str]]:
        """The constraint of an answer (the body's, calls, or either), and what of the schemas it does not follow.

        A regular expression or a grammar of the body is the constraint of the whole text, including its calls.

        Args:
            symbol, special: as for `CallGrammar.in_format`.
        """
        if not self.is_forced and not self.has_own_calls(structure):
            return structure, []
        grammar = CallGrammar(self.tools, self.is_parallel)
        if self.is_forced:
            calls = grammar.arguments() if self.mode == "named" else grammar.json_list()
            return StructuredOutputs(calls=calls), grammar.ignored
        if family.channels is not None:
            calls = grammar.in_channels(family, symbol, "TEXT" if structure is None else f"@{ANSWER}")
        else:
            calls = grammar.in_format(family, symbol, structure is None, special)
        constraint = StructuredOutputs(calls=calls) if structure is None else replace(structure, calls=calls)
        return constraint, grammar.ignored

    def new_parser(self, family: CallFormat) -> Callable[[], AnswerParser]:
        if self.mode == "none":
            return PlainTextParser
        if self.mode == "named":
            return partial(NamedToolParser, self.tools[0].function.name, family.id_length)
        form = replace(FORCED_CALLS, id_length=family.id_length) if self.mode == "required" else family
        return partial(ToolParser, form, self.names, self.max_calls, self.kinds(form))

    def kinds(self, form: CallFormat) -> ToolKinds:
        """The schemas of the arguments of the tools, for a format in which the values have no types."""
        tools = self.tools if form.tags else ()
        return {tool.function.name: argument_kinds(tool.function.parameters) for tool in tools}


class ModelPlanner:
    """Plans the requests of a model: those with a conversation itself, others in the modules of their endpoints."""

    def __init__(self, engine: ServedEngine, options: ApiOptions) -> None:
        self.engine = engine
        self.options = options
        self._template: ChatTemplate | None = engine.tokenizer.chat_template
        if options.chat_template is not None:
            self._template = ChatTemplate(options.chat_template, engine.tokenizer.special_tokens)
        text = "" if self._template is None else self._template.text
        names = (name.lstrip(".") for name in REASONING_NAMES if name in text)
        self._reasoning_name = next(names, REASONING_NAMES[0])
        self._style = call_style(self._template)
        calls = detected_format(options.tool_call_parser, self._template, self._style)
        self._has_unknown_calls = calls is None
        self._calls = calls or TOOL_CALL_FORMATS["hermes"]
        self._reasoning = reasoning_format(options.reasoning_parser, self._template)
        if self._calls.channels is not None and self._reasoning is not None:
            name = next(name for name, form in TOOL_CALL_FORMATS.items() if form is self._calls)
            raise ConfigError(
                f"reasoning_parser={options.reasoning_parser} cannot be combined with tool_call_parser={name}, which "
                "separates reasoning itself: leave out reasoning_parser, or set it to none"
            )

    def tokenizer_info(self) -> dict[str, str | None]:
        """The special tokens by their roles, and the chat template, as in vLLM."""
        template = None if self._template is None else self._template.text
        tokens = self.engine.tokenizer.special_tokens
        return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": template}

    def log_template_warnings(self) -> None:
        """Render probe conversations, and log a warning for each special token that the chat template loses."""
        if self._template is not None and not self.options.allow_special_tokens_in_content:
            log_template_problems(self._template, self.engine.tokenizer)

    def plan(self, conversation: Conversation) -> ChatPlan:
        """The plan of a call that generates from messages; raises RequestError."""
        check_task(self.engine.facts, None)
        body = conversation.to_chat()
        tools = _ToolSelection.of(body)
        if tools.mode == "auto" and self._has_unknown_calls:
            raise RequestError(UNKNOWN_CALLS, "tools")
        text = self._render(body, tools)
        structure = body.constraint()
        is_structured = tools.is_forced or (structure is not None and not tools.has_own_calls(structure))
        if self._calls.channels is not None and is_structured:
            text = join_marked([text, template_text(self._calls.channels.final)])
        reasoning = self._reasoning_in(text, body)
        before_answer = self._before_answer(body, reasoning, is_structured)
        params, ignored = self._params(body, tools, structure, reasoning, before_answer)
        token_ids = self.engine.input_processor.encode_text(
            text, "messages", params, add_special_tokens=bool(body.add_special_tokens)
        )
        if tools.tools:
            lengths = (len(self.engine.tokenizer.token_bytes(token_id)) for token_id in token_ids)
            params = replace(params, tools_start=position_of_tool(tools.tools[0].function, unmarked(text), lengths))
        last = body.messages[-1].for_template()
        echoes = body.echo and last["role"] == "assistant"
        return ChatPlan(
            [(unmarked(text), token_ids)],
            params,
            new_parser=self._new_parser(tools, reasoning, is_structured, text if body.continue_final_message else ""),
            echo=unmarked(last["content"]) if echoes else "",
            finishes_with_tool_calls=tools.mode in ("auto", "required"),
            ignored=(*ignored, *conversation.ignored_content(), *self._ignored(body, reasoning)),
        )

    def _ignored(self, chat: ChatCompletionRequest, reasoning: Reasoning | None) -> list[str]:
        """The fields about reasoning, and variables of the template, without an effect with this model and prompt."""
        has_budget = chat.thinking_token_budget is not None and (reasoning is None or reasoning.max_tokens is None)
        effort = chat.effort_variables
        names = self._template_for(chat).variables
        ignores_effort = bool(effort) and names.isdisjoint(effort)
        others = ["reasoning_effort"] * ignores_effort + ["thinking_token_budget"] * has_budget
        return others + chat.unread_options(names)

    def rendered(self, conversation: Conversation | CountTokensRequest) -> MarkedText:
        """The prompt of a conversation; raises RequestError."""
        body = conversation.to_chat()
        return self._render(body, _ToolSelection.of(body))

    def prompt_token_ids(self, conversation: Conversation | CountTokensRequest) -> list[int]:
        text, body = self.rendered(conversation), conversation.to_chat()
        adds_special = bool(body.add_special_tokens)
        return self.engine.input_processor.encode_text(text, "messages", add_special_tokens=adds_special)

    def _params(
        self,
        body: ChatCompletionRequest,
        tools: _ToolSelection,
        structure: StructuredOutputs | None,
        reasoning: Reasoning | None,
        before_answer: Reasoning | None,
    ) -> tuple[SamplingParams, list[str]]:
        """The sampling parameters, and the parts of the schemas of tools that are not followed."""
        limit, logprobs = body.output_limit(), body.num_logprobs()
        overrides: dict[str, Any] = {"max_tokens": limit, "logprobs": logprobs, "reasoning": before_answer}
        tokenizer = self.engine.tokenizer
        assert isinstance(tokenizer, Tokenizer), "a conversation has been rendered"
        symbol = partial(marker_symbol, tokenizer=tokenizer)
        constraint, ignored = tools.constraint(structure, self._calls, symbol, self._special_tags)
        if constraint is None and reasoning is not None and reasoning.max_tokens is not None:
            constraint = StructuredOutputs(calls=ANY_TOKENS)
        overrides["structured_outputs"] = None if constraint is None else replace(constraint, reasoning=reasoning)
        if self._needs_special_tokens(tools):
            overrides["skip_special_tokens"] = False
        return body.sampling_params(self.engine.facts.sampling_defaults, **overrides), ignored

    def _needs_special_tokens(self, tools: _ToolSelection) -> bool:
        """Whether markers of tool calls or reasoning are special tokens, which are omitted from text by default."""
        markers = self._calls.markers if tools.mode == "auto" else ()
        if self._calls.channels is not None:
            markers += (MESSAGE,)
        if self._reasoning is not None:
            markers += (self._reasoning.opening, self._reasoning.closing)
        return not self._special_markers.isdisjoint(markers)

    @cached_property
    def _special_markers(self) -> frozenset[str]:
        """The markers of calls and reasoning that contain special tokens."""
        tags = () if self._reasoning is None else (self._reasoning.opening, self._reasoning.closing)
        return frozenset(filter(self.engine.tokenizer.special_tokens_in, (*self._calls.markers, MESSAGE, *tags)))

    def _reasoning_in(self, prompt: str, body: ChatCompletionRequest) -> Reasoning | None:
        """The reasoning that an answer to this prompt may begin with; None if the prompt has already ended it."""
        form, end = self._reasoning, prompt.rstrip()
        if form is None or end.endswith(form.closing):
            return None
        # DeepSeek-R1 goes on after a result without a header, in the answer.
        is_implied = form.is_implied and (body.messages[-1].role != "tool" or end.endswith(self._header))
        # An answer that goes on with the last message does not begin with reasoning.
        max_tokens = None if body.continue_final_message else body.thinking_token_budget
        is_inside = is_implied or end.endswith(form.opening)
        return Reasoning(form.opening, form.closing, is_inside, form.label, max_tokens, self._answer_tag)

    @cached_property
    def _special_tags(self) -> tuple[str, ...]:
        """Tags that are no part of an answer, with or without a parser of reasoning."""
        shown = self._reasoning or reasoning_format("auto", self._template)
        return () if shown is None else shown.special

    @property
    def _answer_tag(self) -> str:
        """The opening tag of an answer, after which stop strings count."""
        if self._reasoning is None or self._template is None:
            return ""
        special = self._reasoning.special
        written = [tag for tag in special if tag in self._template.text]  # Macros may compose them.
        return (self._reasoning.answer or (*written, *special, ""))[0]

    def _before_answer(
        self, body: ChatCompletionRequest, reasoning: Reasoning | None, is_structured: bool
    ) -> Reasoning | None:
        """What precedes the text in which stop strings are searched, and of which `min_tokens` counts the tokens."""
        continues = body.continue_final_message and body.messages[-1].for_template()["content"].strip()
        if continues or not (body.stop or body.min_tokens):
            return None
        if (channels := self._calls.channels) is not None:
            return None if is_structured or self.options.reasoning_parser == "none" else channels.before_answer
        if reasoning is None and self._reasoning is not None and self._answer_tag:
            return Reasoning(self._reasoning.opening, self._reasoning.closing, answer=self._answer_tag)
        return reasoning

    @cached_property
    def _header(self) -> str:
        """The text that the template adds to a conversation to request an answer."""
        assert self._template is not None
        messages = [{"role": "user", "content": "a"}]
        with contextlib.suppress(RequestError):
            texts = [self._template.render(messages, add_generation_prompt=adds) for adds in (False, True)]
            return unmarked(texts[1]).removeprefix(unmarked(texts[0])).rstrip()
        return ""

    def _new_parser(
        self, tools: _ToolSelection, reasoning: Reasoning | None, is_structured: bool, continued: str
    ) -> Callable[[], AnswerParser]:
        """The constructor of the parser of an answer, which goes on with the prompt `continued` unless it is empty."""
        if self._calls.channels is not None and not is_structured:
            has_reasoning = self.options.reasoning_parser != "none"
            return partial(
                ChannelParser, self._calls, tools.names, tools.max_calls, has_reasoning, tools.kinds(self._calls)
            )
        rest: Callable[[], AnswerParser] = tools.new_parser(self._calls)
        if self._special_tags:
            rest = partial(SpecialTagParser, self._special_tags, rest)
        answer = rest
        openings = self._calls.openings if tools.mode == "auto" else ()
        if self._reasoning is not None and (tags := self._reasoning.answer) is not None:
            is_inside = continued.rfind(tags[0]) > continued.rfind(tags[1])
            rest = partial(AnswerTagParser, tags, rest, openings, is_inside)
            answer = rest if is_inside or not self._reasoning.has_bare_answers else answer
        if reasoning is None:
            return rest
        return partial(ReasoningParser, reasoning, rest, () if self._calls.is_bare else openings, answer)

    def _render(self, body: ChatCompletionRequest, tools: _ToolSelection) -> MarkedText:
        template = self._template_for(body)
        declared = [{"type": "function", "function": tool.function.for_template()} for tool in tools.tools]
        variables = body.template_variables(template.variables)
        template.check_variables(variables)
        text = self._render_turns(template, body, declared, variables)
        return template_text(text) if self.options.allow_special_tokens_in_content else text

    def _render_turns(
        self,
        template: ChatTemplate,
        body: ChatCompletionRequest,
        declared: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> MarkedText:
        """Render the messages, and give the tools to the template.

        If the template rejects them, complete the tools, and then render the messages in the forms of `adapted_turns`,
        unless the CPU time of one render is used up. If the template omits one of several system messages, merge them.
        """
        separator = template_text(BLANK_LINE)
        complete = list(map(completed_tool, declared))
        toolsets = [declared] if complete == declared else [declared, complete]

        def forms() -> Iterator[list[dict[str, Any]]]:
            for tools in toolsets:
                yield (messages := self._with_tools(template, body.template_messages(), tools, variables))
            yield from adapted_turns(messages, separator)

        def render(messages: list[dict[str, Any]]) -> MarkedText:
            messages = with_separate_texts(messages) if self._style.has_null_content else messages
            messages = with_single_calls(messages) if self._style.has_one_call else messages
            messages = [self._style.adapt(message) for message in messages]
            names = {"reasoning_content": self._reasoning_name}
            messages = [{names.get(name, name): value for name, value in m.items()} for m in messages]
            return _render_template(template, messages, variables, body)

        errors: list[RequestError] = []
        deadline = time.thread_time() + CPU_SECONDS
        for messages in forms():
            try:
                text = render(messages)
            except RequestError as error:
                errors.append(error)
                if time.thread_time() > deadline:
                    break
            else:
                systems = [message["content"] for message in leading_system(messages)]
                is_merged = len(systems) > 1 and not _has_all(text, [*systems[:2], systems[-1]])
                return render(with_one_leading_system(messages, separator)) if is_merged else text
        raise errors[: len(toolsets)][-1]

    def _with_tools(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        declared: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Give the tools to the template, in a variable that it reads or in messages, and return the messages."""
        if template.variables.isdisjoint(TOOL_VARIABLES) and TOOLS_IN_MESSAGE not in template.text:
            example = self._style.example(self._calls) if TOOL_ROLE.search(template.text) else None
            return with_described_tools(messages, declared, example)
        variables |= {**written_variables(template, declared), **variables}
        if "tool_calls" not in template.text:
            messages = [with_written_calls(message, self._calls) for message in messages]
        if "tools" in template.variables:
            variables["tools"] = declared or None
        elif "xml_tools" in template.variables:
            variables["xml_tools"] = [tool["function"] for tool in declared] or None
        elif "functions" not in template.variables:
            messages = with_tools_in_system_message(messages, declared)
        return messages

    def _template_for(self, body: ChatCompletionRequest) -> ChatTemplate:
        if body.chat_template is not None:
            raise RequestError(
                "chat_template: a request must not contain a template: leave it out, or start the server with "
                "--chat-template FILE",
                "chat_template",
            )
        if self._template is None:
            self.engine.tokenizer.render_chat([])  # Raises the error for the missing template.
            raise AssertionError("unreachable")
        return self._template


def _has_all(text: str, parts: list[str]) -> bool:
    """Whether the text contains the parts in this order, without the white space around them."""
    at = 0
    return all((at := text.find(part.strip(), at)) >= 0 for part in parts)


def _render_template(
    template: ChatTemplate, messages: list[dict[str, Any]], variables: dict[str, Any], body: ChatCompletionRequest
) -> MarkedText:
    if not body.continue_final_message:
        return template.render(messages, add_generation_prompt=body.add_generation_prompt, **variables)
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        message = "continue_final_message and add_generation_prompt cannot both be true: leave out one of them"
        raise RequestError(message, "continue_final_message")
    last = messages[-1]
    if last["role"] != "assistant":
        message = f"continue_final_message requires a last message of the assistant, got one of the {last['role']}"
        raise RequestError(message, "continue_final_message")
    content = last["content"] or ""
    if not content.strip():  # The prompt ends where the template writes content, behind the header of the turn.
        messages = [*messages[:-1], {**last, "content": PROBES[0]}]
        text = _cut_after(template.render(messages, add_generation_prompt=False, **variables), PROBES[0])
        return text[: -len(PROBES[0])]
    ending = content.texts[-1] if isinstance(content, TextParts) else content
    return _cut_after(template.render(messages, add_generation_prompt=False, **variables), ending)


def _cut_after(text: MarkedText, content: str) -> MarkedText:
    """The prompt up to the end of the content of the last message."""
    marks = mask_of(text)
    for written in (content, content.strip()):
        at = text.rfind(written)
        # A short content may also be found in what the template writes, such as in the end of a turn.
        while at >= 0 and TEMPLATE in marks[at : at + len(written)]:
            at = text.rfind(written, 0, at + len(written) - 1)
        if at >= 0:
            return text[: at + len(written)]
    message = "continue_final_message cannot be used, because the chat template of this model changes the last message"
    raise RequestError(message, "continue_final_message")
