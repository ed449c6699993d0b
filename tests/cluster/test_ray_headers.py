"""Headers that control Ray Serve do not reach it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from chairlift.cluster.ray_headers import RAY_HEADERS, middlewares
from support.ray_settings import read_settings


def headers_behind_the_filter(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    seen: list[Any] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope)

    (middleware,) = middlewares()
    scope = {"type": "http", "headers": list(headers)}
    asyncio.run(middleware.cls(app)(scope, None, None))  # type: ignore[arg-type]
    assert scope["headers"] == list(headers)
    return list(seen[0]["headers"])


def test_only_headers_of_ray_are_removed() -> None:
    kept = [(b"authorization", b"Bearer x"), (b"x-other", b"\xff"), (b"x-request-id", b"id")]
    removed = [
        (b"Serve_Multiplexed_Model_Id", b"a"),
        (b"x-request-id", b"\xff"),
        *((name, b"1") for name in RAY_HEADERS),
    ]
    assert headers_behind_the_filter(*kept, *removed) == kept


def test_ray_serve_reads_no_other_header() -> None:
    pytest.importorskip("ray")
    from ray.serve._private import constants

    keys = {
        value.lower().replace("_", "-").encode()
        for name, value in vars(constants).items()
        if re.fullmatch(r"SERVE_HTTP_\w+_HEADER|SERVE_SESSION_ID|SERVE_MULTIPLEXED_MODEL_ID", name)
    }
    assert keys == {*RAY_HEADERS, b"x-request-id"}


def test_the_settings_of_a_cluster_put_the_filter_in_front_of_ray_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.serve._private import http_util
    from ray.serve.config import HTTPOptions

    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    monkeypatch.setattr(http_util, name, read_settings()[name])
    found: list[Any] = []

    async def ray_serve(scope: Any, _receive: Any, _send: Any) -> None:
        found.extend(scope["headers"])

    app = http_util._apply_middlewares(ray_serve, http_util.configure_http_middlewares(HTTPOptions()).middlewares)
    headers = [(b"x-request-id", b"\xff"), (b"x-session-id", b"\xff"), (b"host", b"a")]
    asyncio.run(app({"type": "http", "headers": headers}, None, None))
    assert [name for name, _ in found] == [b"host", b"x-request-id"], "Ray Serve adds a request id"
    assert all(value.isascii() for _, value in found)


def test_a_response_has_the_request_id_of_the_answer_alone() -> None:
    pytest.importorskip("ray")
    from ray.serve._private.http_util import RequestIdMiddleware

    async def request_ids(*headers: tuple[bytes, bytes]) -> list[bytes]:
        sent: list[Any] = []

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": list(headers)})

        async def send(message: Any) -> None:
            sent.extend(message["headers"])

        (middleware,) = middlewares()
        scope = {"type": "http", "headers": [(b"x-request-id", b"of-the-client")]}
        await middleware.cls(RequestIdMiddleware(app))(scope, None, send)
        assert [name for name, _ in sent if name != b"x-request-id"] == [b"a"]
        return [value for name, value in sent if name == b"x-request-id"]

    own, other = (b"x-request-id", b"cmpl-1"), (b"a", b"b")
    assert asyncio.run(request_ids(own, other)) == [b"cmpl-1"]
    assert asyncio.run(request_ids(other)) == [b"of-the-client"]


def test_files_of_a_cluster_are_in_the_private_folder_of_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a-long-name")
    settings = read_settings()
    paths = {name: Path(value) for name, value in settings.items() if value.startswith("/")}
    assert {"RAY_TMPDIR", "RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"} <= paths.keys()
    assert {Path("/home/a-long-name/.ray") in (path, *path.parents) for path in paths.values()} == {True}
    node_id = "0" * 56
    assert len(str(paths["RAY_SERVE_HAPROXY_SOCKET_PATH"].parent / node_id / "admin.sock.99999.tmp")) < 108
