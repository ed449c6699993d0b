"""What clients of a running server share: its address, the header of a key, and the message of an error response."""

from __future__ import annotations

from typing import Any

import httpx

from chairlift.errors import ConfigError


def client_settings(url: str, api_key: str | None) -> dict[str, Any]:
    """The `base_url` and the `headers` of an httpx client for a URL with or without /v1. Raises ConfigError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"url must begin with http:// or https://, got {url!r:.100}")
    headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
    try:
        return {"base_url": httpx.URL(base), "headers": headers}
    except httpx.InvalidURL as error:
        raise ConfigError(f"url is invalid ({error}), got {url!r:.100}") from None


def error_message(response: httpx.Response) -> str:
    """The message of a response whose status is an error, or its status if it has none."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {response.status_code}"
