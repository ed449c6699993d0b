"""The routes of the application, each declared once with the right that it needs, and what it may do."""

from __future__ import annotations

from typing import Any, Final

from starlette.routing import Mount

PUBLIC: Final = {
    "/health",
    "/ping",
    "/ready",
    "/metrics",
    "/version",
    "/",
    "/chat",
    "/docs",
    "/openapi.json",
    "/docs/*",
    "/page/*",
}
"""No key: constant work, and nothing about requests."""

READS: Final = {
    "/v1/models",
    "/v1/models/",
    "/v1/models/{model:path}",
    "/v1/requests",
    "/v1/requests/{request_id}",
    "/v1/page",
    "/tokenizer_info",
    "/server_info",
    "/model_info",
    "/v1/page/events",
}
"""Any key: work proportional to what the server keeps anyway. The streams of a key are limited."""

ADMINS: Final = {
    "/v1/engine",
    "/v1/events",
    "/models/load",
    "/models/unload",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
"""Admin keys only."""

COUNTED: Final = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/requests/{request_id}/explain",
    "/v1/page/burst",
}
"""Any key: counts as a request of the key before its body is read."""


def routes_of(app: Any) -> dict[str, str]:
    """The paths of all routes of an application with the method that a test calls."""
    found = {}
    for route in app.routes:
        if isinstance(route, Mount):
            found[f"{route.path}/*"] = "GET"
        else:
            found[route.path] = "POST" if "POST" in (route.methods or ()) else "GET"
    return found
