"""Several replicas of an engine behind one API, on Ray Serve, with a router that knows their prefix caches.

`serve run chairlift.cluster:app config=FILE` runs the application.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """`app` builds the application. It reads the options of the command line, so it is part of it."""
    if name == "app":
        return importlib.import_module("chairlift.cli.cluster_app").build_application
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
