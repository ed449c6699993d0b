"""The path prefix below which a proxy publishes the server, and which the proxy removes from requests."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import Scope

from chairlift.errors import ConfigError

_PATTERN: Final = re.compile(r"(/[\w.~-]+)*", re.ASCII)


def parse_root_path(text: str, name: str = "root_path") -> str:
    """A prefix without the slash at its end.

    Raises:
        ConfigError: the prefix does not begin with a slash, or has other characters than a path of a URL.
    """
    prefix = text.rstrip("/")
    if _PATTERN.fullmatch(prefix) is None:
        raise ConfigError(f"{name}={text!r:.80} is not a path: write it as /chairlift, of letters, digits and - . _ ~")
    return prefix


def route_path(scope: Scope) -> str:
    """The path of a request as the routes name it. uvicorn puts the prefix before the path that the proxy sent.

    A mounted application extends `root_path` by its own path, and keeps the prefix as `app_root_path`.
    """
    path: str = scope["path"]
    return path.removeprefix(scope.get("app_root_path", scope.get("root_path", "")))
