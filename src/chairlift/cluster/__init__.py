"""Several replicas of an engine behind one API, on Ray Serve, with a router that knows their prefix caches.

`serve run chairlift.cluster:app config=FILE` runs the application.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`app` builds the application. Its modules are imported when it is used."""
    if name == "app":
        from chairlift.cluster.application import build_application

        return build_application
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
