from __future__ import annotations

import re

import pytest

from chairlift.errors import ConfigError
from chairlift.system import optional_packages
from chairlift.system.optional_packages import check_installed


def test_a_missing_package_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("json", "otel", "chairlift serve")
    monkeypatch.setattr(optional_packages, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.executable", "/my venv/bin/python")
    expected = (
        "chairlift serve needs opentelemetry, which is not installed: "
        "run '/my venv/bin/python' -m pip install 'chairlift[otel]'"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_installed("opentelemetry", "otel", "chairlift serve")
