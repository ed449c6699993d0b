"""The options of the access log and of traces."""

from __future__ import annotations

import re

import pytest

from chairlift.errors import ConfigError
from chairlift.server import serve_options
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.http.http_protocol import uvicorn_config
from chairlift.server.serve import http_options
from chairlift.server.serve_options import ObservabilityOptions, ServeOptions


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
