"""ModelSpec and ModelLimits: the models that a server offers, and the limits that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.config import EngineConfig
from chairlift.server.preparation.api_options import ApiOptions


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that a server offers and loads when a request needs it.

    Attributes:
        name: its name in requests and responses.
        config: the configuration of its engine.
        aliases: other names in requests.
        keep_alive: seconds without a request after which it is unloaded; None never unloads it for this reason.
        api: the options of the API for its requests.
        common: the configuration of all models. An encoder has no use for some of its options.
    """

    name: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    keep_alive: float | None = None
    api: ApiOptions = field(default_factory=ApiOptions)
    common: EngineConfig | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of all models of a server together.

    Attributes:
        memory_bytes: maximum memory of all engine processes; None is no limit.
        max_waiting: maximum number of calls that wait for a model to be loaded.
    """

    memory_bytes: int | None = None
    max_waiting: int = 1024
