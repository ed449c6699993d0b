"""Every option of a server is used as it is given, is rejected, or has a line that says why it has no effect."""

from __future__ import annotations

import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from uvicorn import Config

from chairlift.cli.serve import _local_cluster
from chairlift.config import EngineConfig
from chairlift.engine.process.thread_client import ThreadClient
from chairlift.errors import ConfigError
from chairlift.option_sources import read_options
from chairlift.options import declared_options
from chairlift.server import serve, serve_options
from chairlift.server.access.access_options import AccessOptions, ServerLimits
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.keys import key_record, new_secret, to_toml
from chairlift.server.http.http_protocol import uvicorn_config
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.serve import http_options
from chairlift.server.serve_options import ObservabilityOptions, ServeOptions
from support.ray_settings import free_port
from support.tiny_engine import tiny_options

SECRET = "ops=secret-of-sixteen"


@dataclass
class Started:
    """A server when it would begin to answer requests.

    Attributes:
        client: the arguments of the client of its engine.
    """

    options: ServeOptions
    client: dict[str, Any]
    config: Config
    manager: ModelManager
    admission: AdmissionController
    address: tuple[Any, ...]

    @property
    def app(self) -> Any:
        return self.config.app

    def api(self, name: str) -> object:
        service = self.manager.default.service
        assert service is not None
        return getattr(service.planner.options, name)

    def middleware(self, name: str) -> object:
        return next(each.kwargs[name] for each in self.app.user_middleware if name in each.kwargs)


Used = Callable[[Started], object]


def limit(name: str) -> Used:
    return lambda server: getattr(server.admission.limits, name)


def api(name: str) -> Used:
    return lambda server: server.api(name)


def uvicorn(name: str) -> Used:
    return lambda server: getattr(server.config, name)


def cluster(server: Started) -> Any:
    """The arguments of the class that starts replicas."""
    assert server.options.replicas is not None
    return _local_cluster(server.options, server.options.replicas).keywords  # type: ignore[attr-defined]


USED: dict[str, tuple[dict[str, Any], Used]] = {
    "host": ({"host": "127.0.0.2"}, lambda server: server.address[0]),
    "port": ({"port": 0}, lambda server: server.address[1]),
    "root_path": ({"root_path": "/below"}, uvicorn("root_path")),
    "served_model_name": ({"served_model_name": "mine"}, lambda server: server.manager.default.name),
    "watchdog_timeout": ({"watchdog_timeout": 7.0}, lambda server: server.client["watchdog_timeout"]),
    "models_memory_bytes": ({"models_memory_bytes": 1 << 30}, lambda server: server.manager.budget),
    "keep_alive": ({"keep_alive": 9.0}, lambda server: server.manager.default.spec.keep_alive),
    "timeout_keep_alive": ({"timeout_keep_alive": 130}, uvicorn("timeout_keep_alive")),
    "max_queued_requests": ({"max_queued_requests": 5}, limit("max_queued_requests")),
    "max_queued_tokens": ({"max_queued_tokens": 5}, limit("max_queued_tokens")),
    "drain_timeout": ({"drain_timeout": 5.0}, limit("drain_timeout")),
    "response_store_bytes": ({"response_store_bytes": 99}, limit("response_store_bytes")),
    "share_prefix_cache": ({"share_prefix_cache": True, "api_key": [SECRET]}, limit("share_prefix_cache")),
    "max_body_bytes": ({"max_body_bytes": 4096}, lambda server: server.middleware("max_bytes")),
    "allow_unauthenticated": ({"allow_unauthenticated": True}, lambda server: server.middleware("hosts") == ("*",)),
    "allowed_hosts": ({"allowed_hosts": "a.b,*.c"}, lambda server: ",".join(server.middleware("hosts"))),  # type: ignore[arg-type]
    "allowed_origins": (
        {"allowed_origins": '["https://a.b"]'},
        lambda server: str(list(server.middleware("allow_origins"))).replace("'", '"'),  # type: ignore[call-overload]
    ),
    "tool_call_parser": ({"tool_call_parser": "hermes"}, api("tool_call_parser")),
    "reasoning_parser": ({"reasoning_parser": "none"}, api("reasoning_parser")),
    "chat_template": ({"chat_template": "{{ messages[0].content }}"}, api("chat_template")),
    "allow_special_tokens_in_content": (
        {"allow_special_tokens_in_content": True},
        api("allow_special_tokens_in_content"),
    ),
    "clamp_max_tokens": ({"clamp_max_tokens": False}, api("clamp_max_tokens")),
    "sse_ping_interval": ({"sse_ping_interval": 3.0}, api("sse_ping_interval")),
    "access_log_format": (
        {"access_log_format": "none"},
        lambda server: "text" if server.app.state.listeners else "none",
    ),
}
"""Option -> the options to give, and the value that the server uses."""

REJECTED: dict[str, dict[str, Any]] = {
    "served_model_name": {"served_model_name": "mine", "keep_alive": 9.0},
    "replicas": {"replicas": 2, "keep_alive": 9.0},
    "allow_other_users": {"allow_other_users": True},
    "share_prefix_cache": {"share_prefix_cache": True},
    "allow_unauthenticated": {"allow_unauthenticated": True, "api_key": [SECRET]},
    "ssl_certfile": {"ssl_certfile": "cert.pem"},
    "ssl_keyfile": {"ssl_keyfile": "key.pem"},
    "sse_ping_interval": {"sse_ping_interval": 0},
    "allowed_hosts": {"allowed_hosts": ""},
    "allowed_origins": {"allowed_origins": '["a.b"]'},
    "api_key_file": {"api_key_file": "/no/such/keys.toml"},
    "model_dir": {"model_dir": "/no/such/folder"},
    "models": {"models": {"small": {"unknown": 1}}},
    "root_path": {"root_path": "below"},
}
"""Options that cannot be used as they are given here."""

OTHER = {
    "arguments": "tests/cli/test_model_options.py",
    "model_dir": "tests/cli/test_model_options.py",
    "models": "tests/cli/test_model_options.py",
    "api_key_file": "tests/server/access/test_key_reload.py",
    "ssl_certfile": "tests/server/http/test_tls.py",
    "ssl_keyfile": "tests/server/http/test_tls.py",
    "otlp_traces_endpoint": "tests/cluster/test_replicated_model.py",
    "response_store_bytes": "tests/server/api/test_response_store.py",
    "page_control": "tests/server/web/test_page_routes.py",
    "api_key": "tests/server/access/test_serve_access.py",
    "replicas": "tests/cluster/test_local_cluster.py",
    "allow_other_users": "tests/cluster/test_local_cluster.py",
}
"""Options whose influence needs requests or several files, and the tests that show it."""


def server_options(record: object) -> set[str]:
    """The names of the options of a record and of the records in it, without those of an engine."""
    own = declared_options(type(record)).keys()
    parts = [getattr(record, each.name) for each in fields(record)]  # type: ignore[arg-type]
    inner = [part for part in parts if is_dataclass(part) and not isinstance(part, EngineConfig)]
    return set(own).union(*map(server_options, inner))


def read(values: Mapping[str, Any]) -> ServeOptions:
    return read_options(ServeOptions, values, environment=False)


def start(values: Mapping[str, Any], observe: Used, monkeypatch: pytest.MonkeyPatch) -> object:
    """Start a server without answering requests, and return what `observe` finds."""
    client: dict[str, Any] = {}
    found: list[object] = []
    options = read(values)

    class Engine:
        def __init__(self, config: EngineConfig, **rest: Any) -> None:
            client.update(config=config, **rest)

        def wait_until_ready(self) -> ThreadClient:
            return ThreadClient(client["config"])

    class Server:
        def __init__(self, config: Config, manager: ModelManager, admission: AdmissionController, *_: object) -> None:
            self.parts = config, manager, admission

        def run(self, sockets: list[socket.socket]) -> None:
            address = sockets[0].getsockname()
            sockets[0].close()
            found.append(observe(Started(options, client, *self.parts, address)))

    monkeypatch.setattr(serve, "ProcessClient", Engine)
    monkeypatch.setattr("chairlift.server.draining_server.DrainingServer", Server)
    for name in ("limit_arenas", "trim_memory"):
        monkeypatch.setattr(serve, name, lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _seconds: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("faulthandler.register", lambda *_, **__: None)
    serve.run(options, time.perf_counter())
    return found[0]


def tiny(folder: Path) -> dict[str, Any]:
    return {"port": 0, **tiny_options(folder, num_kv_blocks=32)}


def test_every_option_is_in_a_table() -> None:
    assert server_options(ServeOptions()) == USED.keys() | REJECTED.keys() | OTHER.keys()
    root = Path(__file__).parents[2]
    names = {**OTHER, "model": OTHER["arguments"]}
    del names["arguments"]
    texts = {name: (root / file).read_text(encoding="utf-8").replace("-", "_") for name, file in names.items()}
    assert [name for name, text in texts.items() if name not in text] == []


@pytest.mark.parametrize("name", USED)
def test_options_are_used_as_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, used = USED[name]
    if name == "port":
        given = {"port": free_port()}
    assert start(tiny(tmp_path) | given, used, monkeypatch) == given[name]


@pytest.mark.parametrize("name", REJECTED)
def test_options_that_cannot_be_used_are_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny(tmp_path) | REJECTED[name]
    if "models" in values or "model_dir" in values:
        del values["model"]
    with pytest.raises(ConfigError) as failed:
        start(values, cluster if name == "replicas" else lambda _server: None, monkeypatch)
    assert name in str(failed.value)


def test_options_of_the_engine_reach_it_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tiny(tmp_path) | {"max_num_seqs": 3, "scheduling_policy": "fair", "seed": 5}
    config = start(values, lambda server: server.client["config"], monkeypatch)
    assert config == EngineConfig(**{name: value for name, value in values.items() if name != "port"})


def test_shares_of_tenants_are_set_in_one_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(scheduling_policy="fair", tenant_weights={"alice": 2.0, "bob": 3.0})
    for weight, has_conflict in ((None, False), (4.0, True)):
        file = tmp_path / "keys.toml"
        file.write_text(to_toml(key_record(new_secret(), name="alice", weight=weight)))
        access = AccessOptions(api_key_file=file)
        with caplog.at_level(logging.INFO, "chairlift"):
            if not has_conflict:
                assert serve.server_config(config, access) == config
                continue
            with pytest.raises(ConfigError, match="tenant_weights cannot be combined with the weights of API keys"):
                serve.server_config(config, access)
    assert caplog.messages == ["tenant_weights of bob: no effect until API keys have these names (now: alice)"]


def test_a_shared_prefix_cache_needs_one() -> None:
    with pytest.raises(ConfigError, match="share_prefix_cache needs the prefix cache"):
        read({"share_prefix_cache": True, "api_key": [SECRET], "enable_prefix_caching": False})


def test_options_of_text_are_reported_for_a_model_that_generates_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scoring = {**tiny(tmp_path), "classifier_from_token": ["a", "b"]}
    text = f"no effect on model {tmp_path.name!r}, which generates no text"
    expected = [f"tool_call_parser=hermes, clamp_max_tokens=False: {text}"]
    for given, lines in (({"tool_call_parser": "hermes", "clamp_max_tokens": False}, expected), ({}, [])):
        caplog.clear()
        with caplog.at_level(logging.INFO, "chairlift"):
            start(scoring | given, lambda _server: None, monkeypatch)
        assert [line for line in caplog.messages if "no effect" in line] == lines


def test_a_missing_package_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_options, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.executable", "/my venv/bin/python")
    expected = (
        "otlp_traces_endpoint=http://localhost needs opentelemetry, which is not installed: "
        "run '/my venv/bin/python' -m pip install 'chairlift[otel]'"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ObservabilityOptions(otlp_traces_endpoint="http://localhost")


def test_idle_connections_outlive_those_of_load_balancers() -> None:
    """AWS ALB and nginx use a connection again that was idle for up to 60 s."""
    options = ServeOptions(limits=ServerLimits(timeout_keep_alive=130), root_path="/below")
    config = uvicorn_config(None, **http_options(options))
    assert (config.timeout_keep_alive, config.root_path) == (130, "/below")
    assert http_options(ServeOptions())["timeout_keep_alive"] == 75
