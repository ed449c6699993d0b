"""Policies by name: those of the package, and classes outside of it, which an option names as module:Class."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from typing import Any, Final

from chairlift.errors import ConfigError

QUEUE_BASE: Final = "chairlift.core.queues.request_queue.RequestQueue"
KV_BASE: Final = "chairlift.core.kv.kv_cache_manager.KVCacheManager"
PAGED_BASE: Final = "chairlift.core.kv.paged_kv_cache.PagedKVCacheManager"
RESERVATION_BASE: Final = "chairlift.core.baselines.reservations.ReservationKVCacheManager"
"""The classes from which scheduling policies, KV policies, and those of paged memory and reservations are derived."""

FAIR_POLICIES: Final = ("fair", "dlpm")
PRIORITY_POLICIES: Final = ("priority", "fair")
"""The scheduling policies that share the engine between tenants, and those on which priorities have an influence."""

DEFAULT_LENGTH_PREDICTOR: Final = {"srpt": "history"}
"""The length predictor of a scheduling policy that needs one."""


@cache
def load_class(policy: str, option: str, base: str = "builtins.object") -> type[Any]:
    """Import the class that module:Class names. The current folder is searched last.

    Args:
        option: the option that names it, for the message of an error.
        base: the full name of a class that it must be derived from.

    Raises:
        ConfigError: the module cannot be imported, or has no such class, or the class is abstract.
    """
    module_name, _, class_name = policy.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{option}={policy}: the module {module_name!r} cannot be imported ({type(error).__name__}: {error}): "
            f"write the name of a module in {folder} or in PYTHONPATH, without .py"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not has_base(found, base):
        own = [name for name, each in vars(module).items() if isinstance(each, type) and each.__module__ == module_name]
        raise ConfigError(
            f"{option}={policy}: {module_name} has no class {class_name!r} that is derived from {base}; its classes "
            f"are {', '.join(own) or 'none'}"
        )
    missing: list[str] = sorted(getattr(found, "__abstractmethods__", ()))
    if missing or getattr(found, "_is_protocol", False):
        lacks = f"is abstract, and does not define {', '.join(missing)}" if missing else "is a Protocol"
        raise ConfigError(f"{option}={policy}: {class_name} {lacks}: name a class that defines all methods")
    return found


def has_base(found: type[Any], base: str) -> bool:
    """Whether a class is derived from the class with this full name."""
    return base in (f"{each.__module__}.{each.__qualname__}" for each in found.__mro__)


def is_class_name(policy: str) -> bool:
    """Whether the name of a policy is a class outside of the package."""
    return ":" in policy


def is_fair(policy: str) -> bool:
    """Whether a scheduling policy shares the engine between tenants."""
    return policy in FAIR_POLICIES or (is_class_name(policy) and queue_class(policy).is_fair)


def default_length_predictor(policy: str) -> str:
    """The length predictor of a scheduling policy if none is named: "none" if it needs no predictions."""
    if is_class_name(policy):
        return str(queue_class(policy).default_length_predictor)
    return DEFAULT_LENGTH_PREDICTOR.get(policy, "none")


def uses_priority(policy: str) -> bool:
    """Whether priorities may have an influence on a scheduling policy."""
    return policy in PRIORITY_POLICIES or (is_class_name(policy) and queue_class(policy).uses_priority)


def is_paged(kv: str) -> bool:
    """Whether a KV policy allocates blocks on demand, and can share those of equal prefixes."""
    return kv == "paged" or (is_class_name(kv) and has_base(kv_class(kv), PAGED_BASE))


def reserves(kv: str) -> bool:
    """Whether a KV policy takes consecutive blocks from an arena when it admits a request."""
    return has_base(kv_class(kv), RESERVATION_BASE) if is_class_name(kv) else kv != "paged"


def queue_class(policy: str) -> Any:
    """The class of a scheduling policy that is outside of the package. Raises ConfigError as `load_class`."""
    return load_class(policy, "scheduling_policy", QUEUE_BASE)


def kv_class(kv: str) -> Any:
    """The class of a KV policy that is outside of the package. Raises ConfigError as `load_class`."""
    return load_class(kv, "kv", KV_BASE)
