"""The application of Ray Serve, `chairlift.cluster:app`, from a configuration file of `chairlift serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click import ClickException
from typer.main import get_command

from chairlift.cli.commands import Commands
from chairlift.cli.config_file import ENVIRONMENT_SETTINGS
from chairlift.cli.model_options import ModelOptions
from chairlift.cli.option_groups import OptionValues
from chairlift.cli.serve_command import ServedModels, add_all_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.resolve import model_name
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.models.model_spec import ModelSpec
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.web.page_options import PageOptions

if TYPE_CHECKING:
    from ray.serve import Application


def build_application(arguments: Mapping[str, Any]) -> Application:
    """Build the application of Ray Serve.

    Args:
        arguments: `config`, the path of a configuration file of `chairlift serve`, and fields of `ClusterOptions`.

    Raises:
        ConfigError: an argument or an option of the file is unknown or invalid.
    """
    from chairlift.cluster.cluster_app import ClusterSetup
    from chairlift.cluster.cluster_options import ClusterOptions
    from chairlift.cluster.ray_deployments import build_application

    given = dict(arguments)
    file = given.pop("config", None)
    known = {field.name: field for field in fields(ClusterOptions)}
    if unknown := given.keys() - known:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: not an argument of chairlift.cluster:app; known are config, "
            f"{', '.join(known)}"
        )
    values = {name: _parse(name, value, str(known[name].type)) for name, value in given.items()}
    served = read_serve_options(None if file is None else Path(str(file)))
    values.setdefault("watchdog_timeout", served["watchdog_timeout"])
    models = tuple(served["specs"])
    for spec in models:
        if spec.config.num_threads is None and spec.config.device == "cpu":
            raise ConfigError("num_threads is not set: set num-threads in the configuration file of the cluster")
    access = served["access"]
    weights = access.keys.tenant_weights()
    if weights:
        models = tuple(replace(spec, config=replace(spec.config, tenant_weights=weights)) for spec in models)
    options = ClusterOptions(**values)
    setup = ClusterSetup(models, options, served["limits"], access, served["observability"], served["pages"])
    return build_application(setup)


def _parse(name: str, value: Any, kind: str) -> Any:
    """The value of an option. `serve run app name=value` passes all values as text."""
    if not isinstance(value, str) or name == "router":
        return value
    try:
        return float(value) if "float" in kind else int(value)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {value!r:.80}") from None


def read_serve_options(file: Path | None) -> dict[str, Any]:
    """The objects that `chairlift serve` is called with, from a configuration file and CHAIRLIFT_* variables, and the
    `specs` of its models.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown or invalid.
    """
    found: dict[str, Any] = {}

    def collect(
        model: ServedModels = None,
        *,
        options: OptionValues,
        models: ModelOptions,
        config: EngineConfig,
        limits: ServerLimits,
        access: AccessOptions,
        api: ApiOptions,
        observability: ObservabilityOptions,
        pages: PageOptions,
    ) -> None:
        found.update(limits=limits, access=access, observability=observability, pages=pages)
        found["specs"] = _specs(models, config, api, options["served_model_name"])
        found["watchdog_timeout"] = options["watchdog_timeout"]

    parser = Commands()
    parser.command(context_settings=ENVIRONMENT_SETTINGS)(add_all_options(collect))
    try:
        get_command(parser).main([] if file is None else ["--config", str(file)], standalone_mode=False)
    except ClickException as error:
        raise ConfigError(error.format_message()) from None
    return found


def _specs(models: ModelOptions, config: EngineConfig, api: ApiOptions, name: str | None) -> list[ModelSpec]:
    """The models of a cluster, which are always loaded."""
    if models.on_demand:
        return models.specs(config, api)
    return [ModelSpec(name or model_name(config.model), config, (), None, api)]
