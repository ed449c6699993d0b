"""Calls of all kinds to a server with three models: each is answered as it must be, or its client disconnects."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
from safetensors.numpy import save_file

CHAT, TINY, ENCODER, ADAPTER = "chat", "tiny", "encoder", "adapter"
"""The names of the models and of the adapter of TINY that is loaded at the start."""

CONCURRENCY: Final = 6
READ_SECONDS: Final = 3.0
"""Seconds for which a reader reads a stream of events."""

NUM_SCHEMAS: Final = 200
"""Different schemas, more than a compiler keeps."""

LARGE_CHARACTERS: Final = 40_000
"""A body of this size is parsed on a thread."""

WORDS: Final = ["a", "chairlift", "never", "stops", "for", "boarding", "the", "next", "rider", "takes", "seat"]

Body = dict[str, Any]
Kind = Callable[["SoakCalls", random.Random], Awaitable[None]]


class SoakCalls:
    """Makes calls at random. A wrong answer raises an AssertionError.

    Args:
        adapter: the folder of an adapter of TINY.

    Attributes:
        counts: the number of calls of each kind.
    """

    def __init__(self, url: str, adapter: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._url = url
        self._adapter = adapter
        self._random = random.Random(seed)
        self._last_id = "unknown"

    async def run(self, count: int) -> None:
        """Make `count` calls, CONCURRENCY at a time."""
        kinds = self._random.choices(list(KINDS), weights=list(KINDS.values()), k=count)
        calls = iter([(kind, random.Random(self._random.random())) for kind in kinds])
        async with httpx.AsyncClient(base_url=self._url, timeout=300, trust_env=False) as self._http:

            async def work() -> None:
                for kind, draw in calls:
                    await kind(self, draw)
                    self.counts[kind.__name__.strip("_").replace("_", " ")] += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(work())

    async def _post(self, path: str, body: Body, status: int = 200) -> Any:
        response = await self._http.post(path, json=body)
        assert response.status_code == status, f"{path}: {response.status_code} {response.text:.400}"
        answer = response.json()
        self._last_id = answer.get("id", self._last_id) if isinstance(answer, dict) else self._last_id
        return answer

    async def _read(self, path: str, method: str = "GET", seconds: float = READ_SECONDS, **options: Any) -> int:
        """Read a stream, disconnect some seconds after its first line, and return the number of lines."""
        num_lines = 0
        async with self._http.stream(method, path, **options) as response:
            assert response.status_code == 200, f"{path}: {await response.aread()!r:.400}"
            try:
                async with asyncio.timeout(None) as limit:
                    async for _line in response.aiter_lines():
                        if not num_lines:
                            limit.reschedule(asyncio.get_running_loop().time() + seconds)
                        num_lines += 1
            except TimeoutError:
                pass
        return num_lines

    # -- kinds -----------------------------------------------------------------------------------------------------

    async def _chat(self, draw: random.Random) -> None:
        body = _chat_body(draw, n=draw.choice((1, 1, 2)))
        assert len((await self._post("/v1/chat/completions", body))["choices"]) == body["n"]

    async def _chat_stream(self, draw: random.Random) -> None:
        body = _chat_body(draw, stream=True)
        assert await self._read("/v1/chat/completions", "POST", 60.0, json=body) > 2

    async def _abandoned_chat(self, draw: random.Random) -> None:
        body = _chat_body(draw, stream=draw.random() < 0.5, max_tokens=200, ignore_eos=True)
        call = asyncio.ensure_future(self._http.post("/v1/chat/completions", json=body))
        await asyncio.sleep(draw.choice((0.0, 0.05, 0.3)))
        call.cancel()
        await asyncio.wait({call})

    async def _constrained_chat(self, draw: random.Random, **fields: Any) -> Any:
        """The answer of a chat that follows a grammar; an empty one if a busy machine has not compiled it in time."""
        response = await self._http.post("/v1/chat/completions", json=_chat_body(draw, max_tokens=60, **fields))
        if response.status_code == 400 and "to compile. Simplify it." in response.text:
            self.counts["too slow"] += 1
            return {"finish_reason": None}
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    async def _tools(self, draw: random.Random) -> None:
        tools = [_tool(index, draw.randrange(NUM_SCHEMAS)) for index in range(draw.randint(1, 3))]
        choice = await self._constrained_chat(draw, tools=tools, tool_choice="required", parallel_tool_calls=False)
        if choice["finish_reason"] == "tool_calls":
            assert all(json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"])

    async def _schema(self, draw: random.Random) -> None:
        schema = {"name": "answer", "schema": _schema(draw.randrange(NUM_SCHEMAS))}
        choice = await self._constrained_chat(draw, response_format={"type": "json_schema", "json_schema": schema})
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])

    async def _other_protocols(self, draw: random.Random) -> None:
        text = _text(draw)
        await self._post("/v1/responses", {"model": CHAT, "input": text, "max_output_tokens": 16})
        message = {"role": "user", "content": text}
        await self._post("/v1/messages", {"model": CHAT, "messages": [message], "max_tokens": 16})

    async def _embeddings(self, draw: random.Random) -> None:
        texts = [_text(draw) for _ in range(draw.randint(1, 16))]
        assert len((await self._post("/v1/embeddings", {"model": ENCODER, "input": texts}))["data"]) == len(texts)

    async def _rerank(self, draw: random.Random) -> None:
        documents = [_text(draw) for _ in range(draw.randint(1, 16))]
        body = {"model": ENCODER, "query": _text(draw), "documents": documents}
        assert len((await self._post("/v1/rerank", body))["results"]) == len(documents)

    async def _adapter_call(self, draw: random.Random) -> None:
        await self._post("/v1/completions", {"model": ADAPTER, "prompt": [draw.randrange(3, 190)], "max_tokens": 8})

    async def _adapter_change(self, draw: random.Random) -> None:
        name = f"adapter-{draw.getrandbits(40):x}"
        loaded = {"lora_name": name, "lora_path": str(self._adapter), "model": TINY}
        response = await self._http.post("/v1/load_lora_adapter", json=loaded)
        if response.status_code == 400:  # Another call uses the memory for it.
            assert "max_loras" in response.text, response.text
            return
        assert response.status_code == 200, response.text
        await self._post("/v1/completions", {"model": name, "prompt": [draw.randrange(3, 190)], "max_tokens": 4})
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _large_body(self, draw: random.Random) -> None:
        text = " ".join(draw.choices(WORDS, k=LARGE_CHARACTERS // 4))
        body = {"model": ENCODER, "input": [text, text], "truncate_prompt_tokens": 40}
        assert len((await self._post("/v1/embeddings", body))["data"]) == 2

    async def _page_reader(self, draw: random.Random) -> None:
        assert await self._read(f"/v1/page/events?model={draw.choice((CHAT, TINY, ENCODER))}") > 0

    async def _event_reader(self, draw: random.Random) -> None:
        assert await self._read(f"/v1/events?model={draw.choice((CHAT, TINY))}") > 0

    async def _observer(self, draw: random.Random) -> None:
        for path in ("/v1/requests", "/metrics", f"/v1/engine?model={TINY}", "/v1/page", "/v1/models", "/", "/chat"):
            assert (await self._http.get(path)).status_code == 200, path
        assert (await self._http.get(f"/v1/requests/{self._last_id}/explain")).status_code in (200, 404)

    async def _burst(self, draw: random.Random) -> None:
        body = {"num_requests": 8, "max_prompt_tokens": 40, "max_output_tokens": 40, "seed": draw.getrandbits(32)}
        assert len((await self._post(f"/v1/page/burst?model={TINY}", body))["requests"]) == 8

    async def _wrong_call(self, draw: random.Random) -> None:
        unknown = f"m{draw.getrandbits(40):x}"
        await self._post("/v1/completions", {"model": unknown, "prompt": "x"}, 404)
        await self._post("/v1/chat/completions", {"model": CHAT, "messages": [], unknown: 1}, 400)
        assert (await self._http.get(f"/{unknown}")).status_code == 404
        broken = await self._http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        assert broken.status_code == 400


KINDS: Final[dict[Kind, int]] = {
    SoakCalls._chat: 3,
    SoakCalls._chat_stream: 3,
    SoakCalls._abandoned_chat: 3,
    SoakCalls._tools: 2,
    SoakCalls._schema: 2,
    SoakCalls._other_protocols: 1,
    SoakCalls._embeddings: 6,
    SoakCalls._rerank: 3,
    SoakCalls._adapter_call: 6,
    SoakCalls._adapter_change: 2,
    SoakCalls._large_body: 2,
    SoakCalls._page_reader: 2,
    SoakCalls._event_reader: 1,
    SoakCalls._observer: 3,
    SoakCalls._burst: 1,
    SoakCalls._wrong_call: 3,
}
"""The kinds of calls with their shares."""


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(3, 30)))


def _chat_body(draw: random.Random, **fields: Any) -> Body:
    messages = [{"role": "user", "content": _text(draw)}]
    return {"model": CHAT, "messages": messages, "max_tokens": 24, "temperature": draw.choice((0, 0.8)), **fields}


def _schema(index: int) -> Body:
    names = [f"field{index}", *WORDS[: index % 4]]
    kinds = ("integer", "boolean")
    properties = {name: {"type": kinds[at % 2]} for at, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _tool(index: int, schema: int) -> Body:
    return {"type": "function", "function": {"name": f"tool{index}", "parameters": _schema(schema)}}


def write_adapter(folder: Path, hidden_size: int, num_layers: int, rank: int = 4) -> Path:
    """Write a LoRA adapter with random weights, as PEFT does, for the query matrices of a Llama model."""
    import numpy as np

    draw = np.random.default_rng(0)
    tensors = {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
        tensors[f"{name}_A.weight"] = draw.standard_normal((rank, hidden_size), np.float32)
        tensors[f"{name}_B.weight"] = draw.standard_normal((hidden_size, rank), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
