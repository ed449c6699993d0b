"""The application of Ray Serve, `chairlift.cluster:app`, from the options of `chairlift serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.cluster.cluster_app import ClusterSetup
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.errors import ConfigError
from chairlift.loading.resolve import model_name, resolve_model
from chairlift.option_sources import read_options
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.serve_options import ServeOptions

if TYPE_CHECKING:
    from ray.serve import Application

PROXY_OPTIONS: Final = ("host", "port", "root_path")
"""Options of connections, which Ray Serve's proxy accepts."""


def build_application(arguments: Mapping[str, Any]) -> Application:
    """Build the application of Ray Serve.

    Args:
        arguments: `config`, the path of a configuration file of `chairlift serve` or the options that it would contain,
            and fields of `ClusterOptions`.

    Raises:
        ConfigError: an argument or an option is unknown, invalid, or without effect in a cluster.
        ModelLoadError: a model cannot be found or downloaded. Ray Serve then keeps the previous version.
    """
    from chairlift.cluster.ray_deployments import bind_application

    given = dict(arguments)
    served = read_serve_options(given.pop("config", None))
    _check_effects(served)
    base = ClusterOptions(watchdog_timeout=served.watchdog_timeout)
    options = read_options(ClusterOptions, given, "chairlift.cluster:app", base=base, environment=False)
    models = _specs(served)
    for spec in models:
        options.actor_options(spec.config)
        resolve_model(spec.config.model, accept_terms=spec.config.accept_terms)
    return bind_application(ClusterSetup(tuple(models), options, served))


def read_serve_options(config: Any) -> ServeOptions:
    """The options of `chairlift serve` from a configuration file and CHAIRLIFT_* variables.

    Args:
        config: the path of the file, a mapping with its content, or None.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown or invalid.
    """
    if config is not None and not isinstance(config, str | Path | Mapping):
        raise ConfigError(f"config must be the path of a file, or options as `name: value`, got {config!r:.80}")
    return read_options(ServeOptions, Path(config) if isinstance(config, str) else config)


def _check_effects(served: ServeOptions) -> None:
    """Reject options that have no effect in a cluster.

    Raises:
        ConfigError: with the name of the option and what has this effect.
    """
    default = ServeOptions()
    if served.replicas is not None:
        raise ConfigError("replicas has no effect in a cluster: use the argument replicas")
    for name in PROXY_OPTIONS:
        if (value := getattr(served, name)) != getattr(default, name):
            raise ConfigError(f"{name}={value} has no effect in a cluster: set http_options of Ray Serve")
    if served.limits.drain_timeout != default.limits.drain_timeout:
        raise ConfigError("drain_timeout has no effect in a cluster: use the argument drain_timeout")
    if served.limits.timeout_keep_alive != default.limits.timeout_keep_alive:
        raise ConfigError(
            "timeout_keep_alive has no effect in a cluster: set keep_alive_timeout_s in http_options of Ray Serve"
        )
    access = served.access
    if access.ssl_certfile is not None or access.ssl_keyfile is not None:
        raise ConfigError("ssl_certfile and ssl_keyfile have no effect in a cluster: set TLS in front of Ray Serve")
    for name in ("models_memory_bytes", "keep_alive"):
        if getattr(served.models, name) is not None:
            raise ConfigError(f"{name} has no effect in a cluster, whose models are always loaded: remove it")
    if not access.keys and not access.allow_unauthenticated:
        raise ConfigError(
            "there is no API key, and Ray Serve's proxy may be reachable from other machines: set api-key-file or "
            "CHAIRLIFT_API_KEY, or allow-unauthenticated: true"
        )


def _specs(served: ServeOptions) -> list[ModelSpec]:
    """The models of a cluster, which are always loaded.

    Raises:
        ConfigError: as for `server_specs`.
    """
    from chairlift.server.serve import server_specs

    name, config, api = served.served_model_name, served.engine, served.api
    if served.models.is_on_demand:
        return server_specs(served.models.specs(config, api), name, served.access)
    return server_specs([ModelSpec(name or model_name(config.model), config, api=api)], None, served.access)
