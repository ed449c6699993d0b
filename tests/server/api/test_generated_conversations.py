"""Generated conversations: each answer is sent back as a client does, and no turn is an error.

The answers are texts that a model could generate: cut at random lengths, with calls whose arguments are random, with
reasoning alone, or empty. The server's own parsers and writers turn them into responses.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic_core import from_json

from chairlift import AsyncLLM
from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.server.application import create_app
from chairlift.server.preparation.api_options import ApiOptions
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.chat_templates import TEMPLATES
from support.running_server import open_options

Row = dict[str, Any]
NUM_CONVERSATIONS = 18
"""Conversations for each template and endpoint."""

CITY: Row = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ["weather", "mcp__demo__weather", "patch"]
FUNCTION: Row = {"type": "function", "name": "weather", "parameters": CITY}
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in NAMES]
CLAUDE_TOOLS = [{"name": name, "input_schema": CITY} for name in NAMES]
RESPONSES_TOOLS = [
    FUNCTION,
    {"type": "namespace", "name": "mcp__demo", "description": "d", "tools": [FUNCTION]},
    {"type": "custom", "name": "patch"},
    {"type": "web_search"},
]
ARGUMENTS = [
    '{"city": "Rome"}',
    "{}",
    '{"city": ',
    "[1]",
    '"x"',
    '{"input": "a\\nb"}',
    '{"city": NaN}',
    '{"city": "\\ud83d"}',
]
TEXTS = ["Well.", " ", "é 🙂", "<tool_call>", "</think>", "{}", '"', "\n\n"]


class ScriptedGeneration:
    """A generation of a known text in random pieces."""

    def __init__(self, text: str, finish_reason: str, draw: random.Random) -> None:
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 4)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        self._deltas = [CompletionOutput(0, piece, [1] * len(piece)) for piece in pieces[:-1]]
        self._deltas.append(CompletionOutput(0, pieces[-1], [1], finish_reason))
        self._whole = CompletionOutput(0, text, [1], finish_reason)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        for delta in self._deltas:
            yield RequestOutput("r", None, [1], [delta], delta.finish_reason is not None)

    async def collect(self) -> RequestOutput:
        return RequestOutput("r", None, [1], [self._whole], True)

    def abort(self) -> None:
        pass


def scripted_text(draw: random.Random) -> str:
    """The text of an answer: perhaps reasoning, text and calls in the format of Hermes."""
    parts = []
    if draw.random() < 0.4:
        parts.append(f"<think>\n{draw.choice(TEXTS)}hm" + ("\n</think>\n\n" if draw.random() < 0.7 else ""))
    if draw.random() < 0.5:
        parts.append(draw.choice(TEXTS))
    for _ in range(draw.choice([0, 0, 1, 1, 2, 3])):
        call = f'{{"name": "{draw.choice(NAMES)}", "arguments": {draw.choice(ARGUMENTS)}}}'
        parts.append(f"<tool_call>\n{call}\n</tool_call>\n")
    return "".join(parts)


def scripted_answer(draw: random.Random) -> ScriptedGeneration:
    text = scripted_text(draw)
    if draw.random() < 0.5:
        return ScriptedGeneration(text[: draw.randint(0, len(text))], "length", draw)
    return ScriptedGeneration(text, "stop", draw)


def result_text(draw: random.Random) -> str:
    return draw.choice(["sunny", "", "{}", "é", "<tool_response>"])


def chat_turns(draw: random.Random, lines: list[Row]) -> list[Row]:
    """The message of an answer, joined as clients do, and results of its calls."""
    message: Row = {"role": "assistant", "content": None}
    calls: dict[int, Row] = {}
    for choice in (choice for line in lines for choice in line["choices"]):
        delta = choice["delta"] if "delta" in choice else choice["message"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls") or []:
            call = calls.setdefault(part.get("index", len(calls)), {"type": "function", "function": {"arguments": ""}})
            call |= {"id": part["id"]} if part.get("id") else {}
            call["function"] |= {"name": part["function"]["name"]} if part["function"].get("name") else {}
            call["function"]["arguments"] += part["function"]["arguments"]
    extras: Row = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    message |= draw.choice([{}, extras, {"provider_specific_fields": {"refusal": None}}])
    if calls or draw.random() < 0.5:
        message["tool_calls"] = list(calls.values()) or None
    results = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": draw.choice([result_text(draw), [{"type": "text", "text": result_text(draw)}], []]),
        }
        for call in calls.values()
        if draw.random() < 0.9
    ]
    return [message, *results]


def responses_turns(draw: random.Random, lines: list[Row]) -> list[Row]:
    """The items of an answer, and results of its calls."""
    output = (lines[-1].get("response") or lines[-1])["output"]
    results = [
        {
            "type": f"{item['type']}_output",
            "call_id": item["call_id"],
            "output": draw.choice([result_text(draw), [{"type": "input_text", "text": result_text(draw)}], []]),
        }
        for item in output
        if item["type"].endswith("_call") and draw.random() < 0.9
    ]
    extras: Row = {"encrypted_content": None} if draw.random() < 0.5 else {}
    return [*({**item, **extras} if item["type"] == "reasoning" else item for item in output), *results]


def claude_turns(draw: random.Random, lines: list[Row]) -> list[Row]:
    """The blocks of an answer, joined as clients do, and a turn with results of its calls."""
    blocks: list[Row] = [dict(block) for block in lines[0].get("content", [])]
    for line in lines:
        if line["type"] == "content_block_start":
            blocks.append({**line["content_block"], "json": ""})
        elif line["type"] == "content_block_delta":
            kind, text = (line["delta"].get(name) for name in ("type", "text"))
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
            blocks[-1][name] += text or line["delta"].get("thinking") or line["delta"].get("partial_json") or ""
    for block in blocks:
        if (text := block.pop("json", "")) and block["type"] == "tool_use":
            block["input"] = parsed_or_text(text)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": draw.choice([result_text(draw), [{"type": "text", "text": result_text(draw)}], [], None]),
            "is_error": draw.choice([True, False, None]),
        }
        for block in blocks
        if block["type"] == "tool_use" and draw.random() < 0.9
    ]
    return [{"role": "assistant", "content": blocks}, *([{"role": "user", "content": results}] if results else [])]


def parsed_or_text(text: str) -> Any:
    """The arguments of a call as a client has them: an object, or text that is no valid JSON."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def sent_lines(answer: httpx.Response) -> list[Row]:
    """The body of an answer, or the data of its events."""
    if "text/event-stream" not in answer.headers["content-type"]:
        return [answer.json()]
    data = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in data]


ENDPOINTS: dict[str, tuple[str, list[Row], Row, Callable[[random.Random, list[Row]], list[Row]]]] = {
    "/v1/chat/completions": ("messages", CHAT_TOOLS, {}, chat_turns),
    "/v1/responses": ("input", RESPONSES_TOOLS, {"store": False}, responses_turns),
    "/v1/messages": ("messages", CLAUDE_TOOLS, {"max_tokens": 32_000}, claude_turns),
}


async def replay(client: httpx.AsyncClient, path: str, draw: random.Random) -> int:
    """Send the turns of one conversation, each with all earlier ones, and return their number."""
    field, tools, fields, next_turns = ENDPOINTS[path]
    system = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.3 and path != "/v1/messages" else []
    turns: list[Row] = [*system, {"role": "user", "content": "Hi"}]
    num_turns = draw.randint(2, 5)
    for _ in range(num_turns):
        body = {field: turns, "tools": tools, "stream": draw.random() < 0.5, **fields}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, (answer.text, turns)
        turns += next_turns(draw, sent_lines(answer))
        if draw.random() < 0.7 or turns[-1].get("role") == "assistant":
            turns.append({"role": "user", "content": draw.choice(["Go on.", "", "é"])})
    return num_turns


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=65_536)
    return with_byte_tokenizer(tiny, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model=str(folder), num_kv_blocks=4096, max_model_len=65_536, num_threads=1)
    yield llm
    llm.close()


@pytest.mark.parametrize("template", ["qwen3", "hermes", "chatml"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_turn_of_a_conversation_is_an_error(
    llm: AsyncLLM, path: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(f"{path} {template}")
    monkeypatch.setattr(llm, "start", lambda *_arguments, **_fields: scripted_answer(draw))
    app = create_app(llm, open_options("tiny", api=ApiOptions(chat_template=TEMPLATES[template])))

    async def run() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return sum([await replay(client, path, draw) for _ in range(NUM_CONVERSATIONS)])

    assert asyncio.run(run()) >= 2 * NUM_CONVERSATIONS
