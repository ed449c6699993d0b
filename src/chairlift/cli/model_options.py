"""The options of `chairlift serve` that name its models, and those that limit models that are loaded on demand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from chairlift.cli.option_groups import Command, OptionValues, option_group, pop_options, with_options
from chairlift.cli.serve_options import read_template
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.resolve import model_name
from chairlift.server.models.model_spec import ModelLimits, ModelSpec
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.worker.memory import available_host_memory, parse_memory

MEMORY_SHARE: Final = 0.8
"""The share of the free memory that is the default of `models_memory_bytes`."""

MODEL_VARIABLE: Final = "CHAIRLIFT_MODEL"

DEFAULT_KEEP_ALIVE: Final = 300.0

MODELS: Final = option_group(
    "Models on demand",
    model_dir=(
        Path | None,
        "Folder with models. A MODEL is looked for here first; without MODEL, all models of the folder are served.",
    ),
    models=(
        str | None,
        'Models by name with their options, as a JSON object: {"small": {"model": "smollm2-135m", "aliases": ["s"], '
        '"quantization": "int8", "keep-alive": 60}}. In the file of --config, a mapping.',
    ),
    models_memory_bytes=(
        str | None,
        "Maximum memory of all loaded models, such as 12GiB. Default: 80 % of the free memory.",
    ),
    keep_alive=(
        float | None,
        "Seconds without a request after which a model is unloaded; -1 never. Default: 300 with several models.",
    ),
)

FIELDS: Final = {field.name for field in fields(EngineConfig)} - {"model"}
API_FIELDS: Final = {"tool_call_parser", "reasoning_parser", "chat_template", "allow_special_tokens_in_content"}
OWN_FIELDS: Final = {"model", "aliases", "keep_alive"}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The models that the command line names.

    Attributes:
        arguments: the values of MODEL.
        models: options by name of the model.
    """

    arguments: list[str]
    model_dir: Path | None
    models: Mapping[str, Any] | None
    memory_bytes: int | None
    keep_alive: float | None

    @property
    def on_demand(self) -> bool:
        """Whether the server loads models when calls need them, instead of one model when it starts."""
        given = (self.model_dir, self.models, self.memory_bytes, self.keep_alive)
        return len(self.arguments) > 1 or any(value is not None for value in given)

    def limits(self, config: EngineConfig) -> ModelLimits:
        """The limits of the models; the default of the memory is a share of what is free now.

        Raises:
            ConfigError: there is no default, because the memory of a GPU is not known yet.
        """
        if self.memory_bytes is None and config.device != "cpu":
            raise ConfigError(
                f"several models on device={config.device} need --models-memory-bytes, the memory of the GPU for them"
            )
        return ModelLimits(self.memory_bytes or int(available_host_memory() * MEMORY_SHARE))

    def specs(self, config: EngineConfig, api: ApiOptions) -> list[ModelSpec]:
        """The models that are loaded on demand.

        Args:
            config, api: the options of all models that have no others.

        Raises:
            ConfigError: no model is named, an option is unknown or invalid, or two models have the same name.
        """
        found = [*self._named(config, api), *self._described(config, api)]
        if not found:
            raise ConfigError(
                f"model_dir={self.model_dir} contains no model: a model is a folder with config.json or a .gguf file"
            )
        _check_names(found)
        for name in ("event_log", "record_trace"):
            if getattr(config, name) is not None and len(found) > 1:
                raise ConfigError(f"{name} is one file, and there are {len(found)} models: set it for each of --models")
        return found

    def _named(self, config: EngineConfig, api: ApiOptions) -> Iterator[ModelSpec]:
        paths: list[str | None] = [self._find(argument) for argument in self.arguments]
        if self.model_dir is not None and not self.arguments:
            paths = [str(path) for path in models_in(self.model_dir)]
        elif not paths and self.models is None:
            paths = [config.model]  # the default model
        for path in paths:
            yield ModelSpec(model_name(path), replace(config, model=path), (), self._keep_alive(None), api)

    def _find(self, argument: str) -> str:
        """The path of a model in `model_dir`, or the argument if it is not there."""
        if self.model_dir is None:
            return argument
        candidates = (self.model_dir / argument, self.model_dir / f"{argument}.gguf")
        return next((str(path) for path in candidates if path.exists()), argument)

    def _described(self, config: EngineConfig, api: ApiOptions) -> Iterator[ModelSpec]:
        for name, given in (self.models or {}).items():
            try:
                yield self._spec(name, {} if given is None else given, config, api)
            except ConfigError as error:
                raise ConfigError(f"models: {name}: {error}") from None

    def _spec(self, name: str, given: Any, config: EngineConfig, api: ApiOptions) -> ModelSpec:
        if not isinstance(given, dict):
            raise ConfigError(f"must have options as `name: value`, got {given!r:.80}")
        values = {str(key).replace("-", "_"): value for key, value in given.items()}
        known = FIELDS | API_FIELDS | OWN_FIELDS
        for key in values.keys() - known:
            close = get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{key} is not an option of a model: {hint}")
        if values.get("kv_cache_memory_bytes") is not None:
            values["kv_cache_memory_bytes"] = parse_memory(values["kv_cache_memory_bytes"], "kv_cache_memory_bytes")
        if values.get("chat_template") is not None:
            values["chat_template"] = read_template(Path(str(values["chat_template"])))
        model = self._find(str(values.get("model", name)))
        own = replace(config, model=model, **_checked(EngineConfig, values, FIELDS))
        own_api = replace(api, **_checked(ApiOptions, values, API_FIELDS))
        return ModelSpec(
            name, own, _aliases(values.get("aliases")), self._keep_alive(values.get("keep_alive")), own_api
        )

    def _keep_alive(self, own: Any) -> float | None:
        seconds = self.keep_alive if own is None else own
        if seconds is None:
            return DEFAULT_KEEP_ALIVE
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or (seconds < 0 and seconds != -1):
            raise ConfigError(f"keep_alive must be a number of seconds, or -1 for no limit, got {seconds!r}")
        return None if seconds == -1 else float(seconds)


def add_model_options(command: Command) -> Command:
    """Add the options of models to a command with a list of arguments `model`, which receives them as `models`.

    The options of the engine, which must be added inside of these, get the first argument.
    """

    def make(given: OptionValues) -> OptionValues:
        chosen = pop_options(given, MODELS)
        arguments = _join_path(list(given["model"] or []))
        given["model"] = arguments[0] if len(arguments) == 1 else None
        text, memory = chosen["models"], chosen["models_memory_bytes"]
        return {
            "models": ModelOptions(
                arguments,
                chosen["model_dir"],
                None if text is None else _parse_models(text),
                None if memory is None else parse_memory(memory, "models_memory_bytes"),
                chosen["keep_alive"],
            )
        }

    return with_options(command, MODELS, make, "models")


def _join_path(arguments: list[str]) -> list[str]:
    """The arguments, as one if they are parts of a path with spaces in the environment variable of the model."""
    whole = os.environ.get(MODEL_VARIABLE, "")
    return [whole] if whole and arguments == whole.split() and Path(whole).exists() else arguments


def models_in(folder: Path) -> list[Path]:
    """The models of a folder: its folders with config.json, and its .gguf files.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"model_dir={folder}: {error.strerror}") from None
    return [path for path in entries if path.suffix == ".gguf" or (path / "config.json").is_file()]


def _checked(record: type[Any], values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The values of these fields of a record; raises ConfigError if one has a wrong type."""
    kinds = get_type_hints(record)
    chosen = {name: values[name] for name in names & values.keys()}
    for name in chosen.keys() - {"speculative_config"}:  # checks its fields itself
        try:
            msgspec.convert(chosen[name], kinds[name], dec_hook=lambda kind, value: kind(value))
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"{name}={chosen[name]!r:.80} has a wrong type: {error}") from None
    return chosen


def _parse_models(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f'models must be models by name, such as {{"small": {{"model": "smollm2-135m"}}}}, got {text!r:.100}'
        )
    return value


def _aliases(value: Any) -> tuple[str, ...]:
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"aliases must be a list of names, got {value!r:.80}")
    return tuple(names)


def _check_names(specs: list[ModelSpec]) -> None:
    seen: dict[str, str] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if name in seen:
                raise ConfigError(
                    f"two models have the name {name!r}: {seen[name]} and {spec.config.model}; give them different "
                    "names with --models"
                )
            seen[name] = str(spec.config.model)
