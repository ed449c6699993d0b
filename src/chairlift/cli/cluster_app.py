"""The application of Ray Serve, `chairlift.cluster:app`, from the options of `chairlift serve`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from click import ClickException
from typer.main import get_command

from chairlift.cli.commands import Commands
from chairlift.cli.config_file import ENVIRONMENT_SETTINGS
from chairlift.cli.model_options import ModelOptions
from chairlift.cli.serve_command import add_all_options, start_server
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.resolve import model_name, resolve_model
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.http.server_limits import ServerLimits
from chairlift.server.models.model_spec import ModelSpec
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.worker.memory import parse_memory

if TYPE_CHECKING:
    from ray.serve import Application

PROXY_OPTIONS: Final = ("host", "port")
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
    from chairlift.cluster.cluster_app import ClusterSetup
    from chairlift.cluster.cluster_options import ClusterOptions
    from chairlift.cluster.ray_deployments import bind_application

    given = dict(arguments)
    config = given.pop("config", None)
    known = {field.name: field for field in fields(ClusterOptions)}
    if unknown := given.keys() - known:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: not an argument of chairlift.cluster:app; known are config, "
            f"{', '.join(known)}"
        )
    values = {name: _parse(name, value, str(known[name].type)) for name, value in given.items()}
    served = read_serve_options(config)
    _check_effects(served)
    values.setdefault("watchdog_timeout", served["options"]["watchdog_timeout"])
    options, access = ClusterOptions(**values), served["access"]
    models = _specs(served)
    for spec in models:
        options.actor_options(spec.config)
        resolve_model(spec.config.model, accept_terms=spec.config.accept_terms)
    setup = ClusterSetup(tuple(models), options, served["limits"], access, served["observability"], served["pages"])
    return bind_application(setup)


def _parse(name: str, value: Any, kind: str) -> Any:
    """The value of an option. `serve run app name=value` passes all values as text."""
    if name == "memory_per_replica" and value is not None:
        return parse_memory(value, name)
    if not isinstance(value, str) or name == "router":
        return value
    try:
        return float(value) if "float" in kind else int(value)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {value!r:.80}") from None


def read_serve_options(config: Any) -> dict[str, Any]:
    """The arguments that `start_server` would get from a configuration file and CHAIRLIFT_* variables.

    Args:
        config: the path of the file, a mapping with its content, or None.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown or invalid.
    """
    if config is not None and not isinstance(config, str | Path | Mapping):
        raise ConfigError(f"config must be the path of a file, or options as `name: value`, got {config!r:.80}")
    is_file = isinstance(config, str | Path)
    found: dict[str, Any] = {}

    def collect(**arguments: Any) -> None:
        found.update(arguments)

    collect.__signature__ = inspect.signature(start_server, eval_str=True)  # type: ignore[attr-defined]
    parser = Commands()
    parser.command(context_settings=ENVIRONMENT_SETTINGS)(add_all_options(collect))
    try:
        get_command(parser).main(
            ["--config", str(config)] if is_file else [], standalone_mode=False, obj=None if is_file else config
        )
    except ClickException as error:
        raise ConfigError(error.format_message()) from None
    return found


def _check_effects(served: Mapping[str, Any]) -> None:
    """Reject options that have no effect in a cluster.

    Raises:
        ConfigError: with the name of the option and what has this effect.
    """
    options, models, access = served["options"], served["models"], served["access"]
    defaults = read_defaults()
    if options["replicas"] is not None:
        raise ConfigError("replicas has no effect in a cluster: use the argument replicas")
    for name in PROXY_OPTIONS:
        if options[name] != defaults[name]:
            raise ConfigError(f"{name}={options[name]} has no effect in a cluster: set http_options of Ray Serve")
    if served["limits"].drain_timeout != ServerLimits().drain_timeout:
        raise ConfigError("drain_timeout has no effect in a cluster: use the argument drain_timeout")
    if access.ssl_certfile is not None or access.ssl_keyfile is not None:
        raise ConfigError("ssl_certfile and ssl_keyfile have no effect in a cluster: set TLS in front of Ray Serve")
    for name, value in (("models_memory_bytes", models.memory_bytes), ("keep_alive", models.keep_alive)):
        if value is not None:
            raise ConfigError(f"{name} has no effect in a cluster, whose models are always loaded: remove it")
    if not access.keys and not access.allow_unauthenticated:
        raise ConfigError(
            "there is no API key, and Ray Serve's proxy may be reachable from other machines: set api-key-file or "
            "CHAIRLIFT_API_KEY, or allow-unauthenticated: true"
        )


def read_defaults() -> dict[str, Any]:
    """The defaults of the options of `chairlift serve`, by name."""
    return {
        name: getattr(parameter.default, "default", parameter.default)
        for name, parameter in inspect.signature(add_all_options(start_server)).parameters.items()
    }


def _specs(served: Mapping[str, Any]) -> list[ModelSpec]:
    """The models of a cluster, which are always loaded.

    Raises:
        ConfigError: as for `server_specs`.
    """
    from chairlift.server.serve import server_specs

    models: ModelOptions = served["models"]
    config: EngineConfig = served["config"]
    api: ApiOptions = served["api"]
    access: AccessOptions = served["access"]
    name: str | None = served["options"]["served_model_name"]
    if models.on_demand:
        return server_specs(models.specs(config, api), name, access)
    return server_specs([ModelSpec(name or model_name(config.model), config, api=api)], None, access)
