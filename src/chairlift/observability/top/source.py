"""Reads the state of a server for `chairlift top`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from chairlift.clock import format_duration
from chairlift.errors import ConfigError

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The response bodies of /v1/engine and /v1/requests."""

    engine: dict[str, Any]
    requests: list[dict[str, Any]]


class SourceError(Exception):
    """The server could not be reached or returned an error."""


class Source(Protocol):
    """A source of snapshots and explanations."""

    async def snapshot(self) -> Snapshot: ...

    async def explain(self, request_id: str) -> list[str]:
        """The explanation of a sequence, with one line for each span of its waits."""
        ...

    async def close(self) -> None: ...


class HttpSource:
    """Reads snapshots from a server through its API.

    Args:
        url: the URL of the server, with or without /v1.

    Raises:
        ConfigError: the URL does not begin with http:// or https://.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"url must begin with http:// or https://, got {url!r}")
        self._client = httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT_SECONDS)

    async def snapshot(self) -> Snapshot:
        engine = await self._get("/v1/engine")
        return Snapshot(engine, (await self._get("/v1/requests"))["data"])

    async def explain(self, request_id: str) -> list[str]:
        call_id = request_id.rpartition("~")[0] or request_id
        body = await self._get(f"/v1/requests/{call_id}/explain")
        return explained_lines(next((s for s in body["sequences"] if s["id"] == request_id), None))

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._client.get(path)
        except httpx.HTTPError as error:
            raise SourceError(f"{self._client.base_url}: {type(error).__name__} {error}".strip()) from None
        if response.status_code == 403:
            raise SourceError(f"{path} needs an admin key: set --api-key")
        if response.status_code != 200:
            raise SourceError(f"{path}: status {response.status_code}")
        body: dict[str, Any] = response.json()
        return body


def explained_lines(sequence: dict[str, Any] | None) -> list[str]:
    """The lines that show an explanation."""
    if sequence is None:
        return ["The server no longer has this request."]
    lines = [
        f"{span['end'] - span['start']:8.3f} s  {span['num_steps']:5d} steps  {span['reason']}: {span['text']}"
        for wait in sequence["waits"]
        for span in wait["spans"]
    ]
    if sequence["position"] is not None:
        expected = sequence["expected_wait"]
        wait = "unknown" if expected is None else format_duration(expected)
        lines.append(f"requests ahead: {sequence['position']}; estimated wait: {wait}")
    return lines + [change["text"] for change in sequence["would_admit"]]
