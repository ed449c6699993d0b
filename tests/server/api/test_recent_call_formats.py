"""Conversations with calls, in the formats of models of 2026, are planned, parsed, replayed and streamed."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from chat_planner import planner

from chairlift.errors import RequestError
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.outputs import CompletionOutput
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.tools.answer_parser import DeltaMessage
from support.call_corpus import ATEM, DSML, HUNYUAN, M3_CALL, RESPONSE, SOLAR, XTML, nested
from support.call_templates import END, START, UNKNOWN, WRITING
from support.chat_tokenizers import byte_level

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F", "parameters": SCHEMA}}]
USER = {"role": "user", "content": "Go."}
JSON_CALL = '{"name": "f", "arguments": {"n": %d}}'
N, R = "qzvalue", "qzreasoning"
WRITTEN: dict[str, tuple[str, str]] = {
    "deepseek_v32": (f"{R}</think>\n\n", DSML % ("function_calls", "n", "false", N, "function_calls")),
    "deepseek_v4": (f"{R}</think>\n\n", DSML % ("tool_calls", "n", "false", N, "tool_calls")),
    "minimax_m3": (f"<mm:think>{R}</mm:think>", M3_CALL % (nested("n", N) + "\n")),
    "kimi_k3": (f"{R}<|close|>think<|sep|>" + RESPONSE % "", XTML % ("n", "number", N)),
    "hy_v3": (f"{R}</think:opensource>", HUNYUAN % ("n", N)),
    "apertus": (f"<|inner_prefix|>{R}<|inner_suffix|>", f'<|tools_prefix|>[{{"f": {{"n": {N}}}}}]<|tools_suffix|>'),
    "gigachat3": ("", f"<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON_CALL.replace('%d', N)}<|message_sep|>"),
    "solar_open": (
        f"<|think|>{R}<|end|>",
        f'<|begin|>assistant<|tool_calls|><|tool_call:begin|>c0<|tool_call:name|>f<|tool_call:args|>{{"n": {N}}}'
        "<|tool_call:end|><|calls|>",
    ),
    "solar_open2": (f"{R}<|think:end|>", SOLAR % ("n", N)),
    "firefunction": ("", f" functools[{JSON_CALL.replace('%d', N)}]"),
    "muse_glimmer": (
        f" to=self<|message|>{R}<|eom|><|start|>assistant",
        " to=f<|message|>" + (ATEM % ("n", N)).removesuffix("<|eom|>") + "<|eot|>",
    ),
    "mistral4": (f"[THINK]{R}[/THINK]", f'[TOOL_CALLS]f[ARGS]{{"n": {N}}}'),
}
"""Family -> the reasoning of an answer after its prompt, and a call."""


def plan(template: str, **fields: Any) -> ChatPlan:
    body = {"messages": [USER], "tools": TOOLS, **fields}
    return planner(template).plan(ChatCompletionRequest.model_validate(body))


def parse(plan: ChatPlan, text: str, size: int) -> DeltaMessage:
    """What a client receives of an answer that arrives in pieces of this size."""
    parser, starts = plan.new_parser(), range(0, len(text), size)
    outputs = [CompletionOutput(0, text[at : at + size], [1], "stop" if at == starts[-1] else None) for at in starts]
    return DeltaMessage.joined([piece for output in outputs for piece in parser.read(output)])


def meaning(delta: DeltaMessage) -> tuple[str, str, list[tuple[str | None, Any]]]:
    calls = [(call.name, json.loads(call.arguments)) for call in delta.tool_calls]
    return delta.content, delta.reasoning, calls


@pytest.mark.parametrize("family", WRITTEN)
def test_two_turns_with_calls_are_read_and_replayed(family: str) -> None:
    reasoning, call = WRITTEN[family]
    template, messages = WRITING[family][1], [USER]
    for number in (1, 2):
        planned = plan(template, messages=messages)
        text = (reasoning + call).replace(N, str(number)).replace(R, "Hm.")
        answers = [parse(planned, text, size) for size in (len(text), 1, 4)]
        expected = ("", "Hm." if reasoning else "", [("f", {"n": number})])
        assert [meaning(answer) for answer in answers] == [expected] * 3
        (found,) = answers[0].tool_calls
        function = {"name": found.name, "arguments": found.arguments}
        messages = [
            *messages,
            {"role": "assistant", "tool_calls": [{"id": found.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": found.id, "content": f"result {number}"},
        ]
    prompt = plan(template, messages=[*messages, USER]).prompts[0][0] or ""
    for number in (1, 2):
        assert call.replace(N, str(number)).strip().replace("<|eot|>", "") in prompt.replace('index="2"', 'index="1"')
        assert f"result {number}" in prompt


@pytest.mark.parametrize("family", WRITTEN)
def test_a_forced_call_is_read_after_the_reasoning(family: str) -> None:
    reasoning = WRITTEN[family][0].replace(R, "Hm.")
    template = WRITING[family][1]
    required, named = (
        plan(template, tool_choice=choice) for choice in ("required", {"type": "function", "function": {"name": "f"}})
    )
    if family == "muse_glimmer":
        assert (required.prompts[0][0] or "").endswith("<|start|>assistant to=user<|message|>")
        reasoning = ""
    expected = ("", "Hm." if reasoning else "", [("f", {"n": 1})])
    if family == "kimi_k3":
        reasoning = reasoning.removesuffix(RESPONSE % "")
    for size in (1, 4, 100):
        assert meaning(parse(required, f"{reasoning}[{JSON_CALL % 1}]", size)) == expected
        assert meaning(parse(named, reasoning + '{"n": 1}', size)) == expected


@pytest.mark.parametrize("family", WRITTEN)
def test_an_answer_without_calls_is_content(family: str) -> None:
    reasoning = WRITTEN[family][0].replace(R, "Hm.")
    answer = {
        "kimi_k3": "Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "muse_glimmer": " to=user<|message|>Yes.<|eot|>",
        "solar_open": "<|begin|>assistant<|content|>Yes.<|end|>",
    }.get(family, "Yes.")
    reasoning = reasoning.removesuffix(RESPONSE % "") + ("<|open|>response<|sep|>" if family == "kimi_k3" else "")
    for tools in (TOOLS, None):
        planned = plan(WRITING[family][1], tools=tools)
        for size in (1, 4, 100):
            assert meaning(parse(planned, reasoning + answer, size)) == ("Yes.", "Hm." if reasoning else "", [])


def with_special(template: str, *tokens: str) -> ModelPlanner:
    """A planner whose tokenizer has these special tokens."""
    made, backend = planner(template), byte_level()
    backend.add_special_tokens(list(tokens))
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"}, chat_template=template)
    return ModelPlanner(type(made.engine)(made.engine.facts, tokenizer), made.options)


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
        ("gigachat3", ("<|message_sep|>", "<|role_sep|>")),
        ("muse_glimmer", ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")),
        ("solar_open", ("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>")),
        ("apertus", ("<|tools_prefix|>", "<|tools_suffix|>")),
    ],
)
def test_markers_that_contain_special_tokens_are_kept_in_the_text(family: str, tokens: tuple[str, ...]) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    body = ChatCompletionRequest.model_validate({"messages": [USER], "tools": strict})
    params = with_special(WRITING[family][1], *tokens).plan(body).params
    assert not params.skip_special_tokens
    assert params.structured_outputs is not None
    assert "<[" in (params.structured_outputs.calls or "")
    assert plan(WRITING["hy_v3"][1]).params.skip_special_tokens


@pytest.mark.parametrize(("suffix", "tag"), [(":6124c78e", ":6124c78e"), ("", "")])
def test_the_suffix_of_the_tags_of_hunyuan_is_that_of_the_template(suffix: str, tag: str) -> None:
    template = WRITING["hy_v3"][1].replace("':opensource'", f"'{suffix}'")
    reasoning, call = (text.replace(":opensource", tag).replace(N, "1") for text in WRITTEN["hy_v3"])
    for name in ("auto", "hy_v3"):
        made = planner(template, tool_call_parser=name)
        planned = made.plan(ChatCompletionRequest.model_validate({"messages": [USER], "tools": TOOLS}))
        assert meaning(parse(planned, reasoning.replace(R, "Hm.") + call, 4)) == ("", "Hm.", [("f", {"n": 1})])


def test_the_prompt_of_firefunction_has_the_functions_and_the_date() -> None:
    template = WRITING["firefunction"][1]
    prompt = plan(template).prompts[0][0] or ""
    assert '"name": "f"' in prompt
    assert "Today is 20" in prompt
    assert "\n[]\nToday" in (plan(template, tools=None).prompts[0][0] or "")
    fields = {"chat_template_kwargs": {"datetime": "Monday"}}
    assert "Today is Monday" in (plan(template, **fields).prompts[0][0] or "")


NO_WORDS = f"{START.partition('{% endif %}')[2]}{END}"
UNNAMED = f"{START}{END}"
REJECTING = f"{START}{{% if m.tool_calls %}}{{{{ raise_exception('no') }}}}{{% endif %}}{END}"


@pytest.mark.parametrize("template", [UNKNOWN, REJECTING])
def test_tools_are_rejected_if_the_format_of_calls_is_unknown(template: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = planner(template, clamp_max_tokens=False)
    assert ["--tool-call-parser" in record.message for record in caplog.records] == [True]
    body = {"messages": [USER], "tools": TOOLS}
    with pytest.raises(RequestError, match="--tool-call-parser and one of hermes, llama3_json") as caught:
        made.plan(ChatCompletionRequest.model_validate(body))
    assert caught.value.param == "tools"
    for fields in ({"tools": None}, {"tool_choice": "none"}, {"tool_choice": "required"}):
        assert made.plan(ChatCompletionRequest.model_validate({**body, **fields}))
    for name in ("hermes", "mistral"):
        assert planner(template, tool_call_parser=name).plan(ChatCompletionRequest.model_validate(body))


def test_a_template_without_words_for_tools_gets_them_in_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    planned = plan(NO_WORDS)
    assert "<tool_call>" in (planned.prompts[0][0] or "")
    assert meaning(parse(planned, f"<tool_call>{JSON_CALL % 1}</tool_call>", 4)) == ("", "", [("f", {"n": 1})])
    assert caplog.text == ""
    planned = plan(UNNAMED)
    assert meaning(parse(planned, f"<tool_call>{JSON_CALL % 1}</tool_call>", 4)) == ("", "", [("f", {"n": 1})])
    assert "read in that of hermes" in caplog.text
