"""The options of the access log and of traces."""

from __future__ import annotations

import re

import pytest

from chairlift.errors import ConfigError
from chairlift.server import serve_options
from chairlift.server.serve_options import ObservabilityOptions


def test_a_missing_package_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_options, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.executable", "/my venv/bin/python")
    expected = (
        "otlp_traces_endpoint=http://localhost needs opentelemetry, which is not installed: "
        "run '/my venv/bin/python' -m pip install 'chairlift[otel]'"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ObservabilityOptions(otlp_traces_endpoint="http://localhost")
