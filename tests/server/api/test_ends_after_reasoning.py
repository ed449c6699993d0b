"""Stop strings, `min_tokens`, stop tokens and grammars of answers with reasoning, as the guide says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.server.preparation.api_options import ApiOptions
from support.running_server import RunningServer, run_server
from support.scripted_model import write_scripted_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:{{ '\\n' }}"
THOUGHTS = ["Hm, ", "Note: ", "check."]
REST = ["An ", "answer. ", "Remark", ": no", "te."]
ANSWER = "".join(REST)


class Format(NamedTuple):
    """What an answer has before and after its reasoning and its text."""

    opening: list[str]
    closing: list[str]
    end: list[str] = []  # noqa: RUF012
    is_special: bool = False
    options: dict[str, str] = {}  # noqa: RUF012

    @property
    def words(self) -> list[str]:
        return [*self.opening, *THOUGHTS, *self.closing, *REST, *self.end]


HARMONY = ["<|channel|>analysis<|message|>"], ["<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"]
FORMATS = {
    "qwen3": Format(["<think>"], ["</think>", "\n\n"], is_special=True),
    "deepseek_r1": Format([], ["</think>", "\n\n"]),
    "granite": Format(["Here is my", " thought process:"], ["Here is", " my response:", "\n\n"]),
    "hunyuan_a13b": Format(["<think>"], ["</think>", "\n<answer>\n"], ["</answer>"]),
    "openai": Format(*HARMONY, options={"tool_call_parser": "openai"}),
}
HAS_TAGS = ("hunyuan_a13b", "openai")


@pytest.fixture(scope="module", params=FORMATS)
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    form = FORMATS[request.param]
    special = (*form.opening, "</think>") if form.is_special else ()
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"), form.words, TEMPLATE, special)
    llm = AsyncLLM(model=str(folder), num_kv_blocks=60, num_threads=1, max_num_seqs=2)
    with run_server(llm, "tiny", api=ApiOptions(**(form.options or {"reasoning_parser": request.param}))) as running:
        yield request.param, running


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


def chat(server: RunningServer, fields: dict[str, Any], stream: bool) -> tuple[str, str, str]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}
    answer = server.post("/v1/chat/completions", body)
    choices = [choice for event in (events(answer) if stream else [answer.json()]) for choice in event["choices"]]
    parts = [choice["delta" if stream else "message"] for choice in choices]
    texts = ("".join(part.get(name) or "" for part in parts) for name in ("reasoning_content", "content"))
    reasoning, content = texts
    return reasoning, content, choices[-1]["finish_reason"]


def responses(server: RunningServer, fields: dict[str, Any], stream: bool) -> tuple[str, str, str]:
    answer = server.post("/v1/responses", {"input": "Hi", "stream": stream, "max_output_tokens": 40, **fields})
    whole = events(answer)[-1]["response"] if stream else answer.json()
    found = {"reasoning": "", "message": ""}
    for item in whole["output"]:
        found[item["type"]] += "".join(part["text"] for part in item["content"])
    return found["reasoning"], found["message"], "stop" if whole["status"] == "completed" else "length"


def messages(server: RunningServer, fields: dict[str, Any], stream: bool) -> tuple[str, str, str]:
    fields = {"stop_sequences" if name == "stop" else name: value for name, value in fields.items()}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "stream": stream, **fields}
    answer = server.post("/v1/messages", body)
    if stream:
        deltas = [event["delta"] for event in events(answer) if "delta" in event]
        texts = ("".join(delta.get(name, "") for delta in deltas) for name in ("thinking", "text"))
        reason = deltas[-1]["stop_reason"]
    else:
        blocks = answer.json()["content"]
        texts = ("".join(block.get(name, "") for block in blocks) for name in ("thinking", "text"))
        reason = answer.json()["stop_reason"]
    reasoning, content = texts
    assert reason in ("end_turn", "max_tokens", "stop_sequence")
    return reasoning, content, "length" if reason == "max_tokens" else "stop"


STREAMED = {chat: False, responses: True, messages: False}
"""Whether the next answer of an endpoint is streamed."""


def expect(server: RunningServer, fields: dict[str, Any], reasoning: str, content: str, reason: str = "stop") -> None:
    """Every endpoint answers so, in turn streamed and whole."""
    for call, is_streamed in STREAMED.items():
        STREAMED[call] = not is_streamed
        limit = {"max_tokens": 40} if call is chat else {}
        thought, text, end = call(server, {"temperature": 0, **limit, **fields}, is_streamed)
        # Padding is the first of equal tokens, if EOS is masked.
        assert (thought, text.replace("<pad>", ""), end) == (reasoning, content, reason), (call.__name__, is_streamed)


def test_stop_strings_act_after_the_reasoning(served: tuple[str, Any]) -> None:
    _name, server = served
    thoughts = "".join(THOUGHTS)
    for stop, content in (
        (["Note:", "check"], ANSWER),
        (["Remark:"], "An answer. "),
        (["\n"], ANSWER),
        (["an", "answer"], "An "),
        (["final", "</think>", "response", "thought"], ANSWER),
    ):
        expect(server, {"stop": stop}, thoughts, content)
    expect(server, {"stop": ["answer"], "include_stop_str_in_output": True}, thoughts, "An answer")


def test_min_tokens_counts_after_the_reasoning(served: tuple[str, Any]) -> None:
    name, server = served
    form, thoughts = FORMATS[name], "".join(THOUGHTS)
    length = len(REST) + len(form.end)
    for num_tokens, reason in ((length, "stop"), (length + 1, "length")):
        for fields in ({}, {"stop": ["x"]}):
            expect(server, {"min_tokens": num_tokens, "skip_special_tokens": True, **fields}, thoughts, ANSWER, reason)
    expect(server, {"min_tokens": 5, "stop": ["Remark:", "te"]}, thoughts, "An answer. Remark: no")
    expect(server, {"min_tokens": 2, "stop": ["An", "Remark:", "te"]}, thoughts, "An answer. ")


def test_stop_tokens_act_in_the_reasoning_too(served: tuple[str, Any]) -> None:
    name, server = served
    ids = {word: server.llm.engine.tokenizer.token_to_id(word) for word in FORMATS[name].words}
    expect(server, {"stop_token_ids": [ids["Note: "]]}, "Hm, ", "")
    expect(server, {"stop_token_ids": [ids["Remark"]]}, "".join(THOUGHTS), "An answer. ")


def test_grammars_act_after_the_reasoning(served: tuple[str, Any]) -> None:
    name, server = served
    if name in HAS_TAGS:  # The grammar of the answer does not permit its tag, and harmony answers without reasoning.
        return
    expect(server, {"structured_outputs": {"regex": re.escape(ANSWER)}}, "".join(THOUGHTS), ANSWER)
    expect(
        server, {"structured_outputs": {"choice": ["An answer. "]}, "stop": ["Note:"]}, "".join(THOUGHTS), "An answer. "
    )


def test_without_a_parser_of_reasoning_all_text_is_the_answer(tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path, FORMATS["qwen3"].words, TEMPLATE)
    llm = AsyncLLM(model=str(folder), num_kv_blocks=60, num_threads=1, max_num_seqs=2)
    with run_server(llm, "tiny", api=ApiOptions(reasoning_parser="none")) as running:
        expect(running, {"stop": ["Note:"]}, "", "<think>Hm, ")
        body = {"prompt": "Hi\n", "stop": ["Note:"], "max_tokens": 40, "temperature": 0}
        assert running.post("/v1/completions", body).json()["choices"][0]["text"] == "<think>Hm, "
