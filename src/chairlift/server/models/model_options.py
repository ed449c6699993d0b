"""The models that a server offers, and the options that name them and limit those that are loaded on demand."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.gguf_file import part_paths
from chairlift.loading.resolve import model_name
from chairlift.option_sources import read_options
from chairlift.options import check_options, object_parser, option
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.system.memory_amounts import parse_memory
from chairlift.worker.memory import available_memory

MEMORY_SHARE: Final = 0.8  # of the free memory, the default of `models_memory_bytes`
MODEL_VARIABLE: Final = "CHAIRLIFT_MODEL"
DEFAULT_KEEP_ALIVE: Final = 300.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that a server offers. A model that is always loaded has only names and `api`; the other fields say how to
    load one when a request needs it.

    Attributes:
        name: its name in requests and responses.
        config: the configuration of its engine.
        aliases: other names in requests.
        keep_alive: seconds without a request after which it is unloaded; None never unloads it for this reason.
        api: the options of the API for its requests.
        common: the configuration of all models. An encoder has no use for some of its options.
    """

    name: str
    config: EngineConfig = field(default_factory=EngineConfig)
    aliases: tuple[str, ...] = ()
    keep_alive: float | None = None
    api: ApiOptions = field(default_factory=ApiOptions)
    common: EngineConfig | None = None


@dataclass(frozen=True, slots=True)
class NamedModelOptions:
    """The options of one model of `ModelOptions.models`. Those that are not given are the options of all models."""

    OPTION_GROUP: ClassVar = "Model"

    aliases: Sequence[str] | None = option(None, "Other names in requests.", is_repeated=True)
    keep_alive: float | None = option(None, "Seconds without a request after which the model is unloaded; -1 never.")
    engine: EngineConfig = field(default_factory=EngineConfig)
    api: ApiOptions = field(default_factory=ApiOptions)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The models that a server has."""

    OPTION_GROUP: ClassVar = "Models on demand"

    arguments: Sequence[str] | None = option(
        None,
        "Folder, .gguf file, name of a packaged model (see chairlift pull --help), or name on the hub. Several models "
        "are loaded on demand. Default: SmolLM2-135M-Instruct.",
        name="model",
        is_positional=True,
    )
    model_dir: Path | None = option(
        None,
        "Folder with models. A MODEL is looked for here first; without MODEL, all models of the folder are served.",
    )
    models: Mapping[str, Any] | None = option(
        None,
        'Models by name with their options, as a JSON object: {"small": {"model": "smollm2-135m", "aliases": ["s"], '
        '"quantization": "int8", "keep-alive": 60}}. In the file of --config, a mapping.',
        parse=object_parser('{"small": {"model": "smollm2-135m"}}'),
    )
    models_memory_bytes: int | None = option(
        None,
        "Maximum memory of all loaded models, such as 12GiB. Default: 80 % of the free memory.",
        parse=parse_memory,
    )
    keep_alive: float | None = option(
        None,
        "Seconds without a request after which a model is unloaded; -1 never. Default: 300 with several models.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "arguments", _join_path(list(self.arguments or ())))

    @property
    def is_on_demand(self) -> bool:
        """Whether the server loads models when calls need them, instead of one model when it starts."""
        given = (self.model_dir, self.models, self.models_memory_bytes, self.keep_alive)
        return len(self.arguments or ()) > 1 or any(value is not None for value in given)

    @property
    def only_model(self) -> str | None:
        """The model, if one is named on the command line."""
        return self.arguments[0] if self.arguments and len(self.arguments) == 1 else None

    def memory_budget(self, config: EngineConfig) -> int:
        """Maximum memory of all engine processes in bytes; by default a share of what is free now. Raises ConfigError
        on a GPU, whose memory is not known yet."""
        if self.models_memory_bytes is None and config.device != "cpu":
            message = (
                f"several models on device={config.device} need --models-memory-bytes, the memory of the GPU for them"
            )
            raise ConfigError(message)
        return self.models_memory_bytes or int(available_memory() * MEMORY_SHARE)

    def specs(self, config: EngineConfig, api: ApiOptions) -> list[ModelSpec]:
        """The models that are loaded on demand. Raises ConfigError if no model is named, an option is unknown or
        invalid, or two models have the same name.

        Args:
            config, api: the options of all models that have no others.
        """
        found = [*self._unnamed(config, api), *self._named(config, api)]
        if not found:
            message = (
                f"model_dir={self.model_dir} contains no model: a model is a folder with config.json or a .gguf file"
            )
            raise ConfigError(message)
        check_names(found)
        for name in ("event_log", "record_trace"):
            if getattr(config, name) is not None and len(found) > 1:
                raise ConfigError(f"{name} is one file, and there are {len(found)} models: set it for each of --models")
        return found

    def _unnamed(self, config: EngineConfig, api: ApiOptions) -> Iterator[ModelSpec]:
        paths: list[str | None] = [self._find(argument) for argument in self.arguments or ()]
        if self.model_dir is not None and not paths:
            paths = [str(path) for path in models_in(self.model_dir)]
        elif not paths and self.models is None:
            paths = [config.model]  # the default model
        for path in paths:
            yield ModelSpec(model_name(path), replace(config, model=path), (), self._keep_alive(None), api, config)

    def _named(self, config: EngineConfig, api: ApiOptions) -> Iterator[ModelSpec]:
        for name, given in (self.models or {}).items():
            if given is not None and not isinstance(given, dict):
                raise ConfigError(f"models: {name}: must have options as `name: value`, got {given!r:.80}")
            base = NamedModelOptions(engine=replace(config, model=name), api=api)
            try:
                own = read_options(NamedModelOptions, given or {}, f"models: {name}", base=base, environment=False)
                engine = replace(own.engine, model=self._find(str(own.engine.model)))
                aliases = tuple(own.aliases or ())
                yield ModelSpec(name, engine, aliases, self._keep_alive(own.keep_alive), own.api, config)
            except ConfigError as error:
                raise ConfigError(f"models: {name}: {str(error).removeprefix(f'models: {name}: ')}") from None

    def _find(self, argument: str) -> str:
        """The path of a model in `model_dir`, or the argument if it is not there."""
        if self.model_dir is None:
            return argument
        if (path := self.model_dir / argument).exists():
            return str(path)
        return next((str(each) for each in models_in(self.model_dir) if model_name(str(each)) == argument), argument)

    def _keep_alive(self, own: float | None) -> float | None:
        seconds = self.keep_alive if own is None else own
        if seconds is None:
            return DEFAULT_KEEP_ALIVE
        if not math.isfinite(seconds) or (seconds < 0 and seconds != -1):
            raise ConfigError(f"keep_alive must be a number of seconds, or -1 for no limit, got {seconds:g}")
        return None if seconds == -1 else seconds


def _join_path(arguments: list[str]) -> list[str]:
    """The arguments, as one if they are parts of a path with spaces in the environment variable of the model."""
    whole = os.environ.get(MODEL_VARIABLE, "")
    return [whole] if whole and arguments == whole.split() and Path(whole).exists() else arguments


def models_in(folder: Path) -> list[Path]:
    """The models of a folder: its folders with config.json, and its .gguf files, of which one part names a split model.
    Raises ConfigError if the folder cannot be read."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"model_dir={folder}: {error.strerror}") from None
    models = [path for path in entries if path.suffix == ".gguf" or (path / "config.json").is_file()]
    return sorted({part_paths(path)[0]: path for path in reversed(models)}.values())


def check_names(specs: Sequence[ModelSpec]) -> None:
    """Raise ConfigError if a model or LoRA adapter has the name or alias of another one."""
    seen: dict[str, str] = {}
    kinds = "models or LoRA adapters" if any(spec.config.lora_modules for spec in specs) else "models"
    for spec in specs:
        named = [(name, str(spec.config.model or name)) for name in (spec.name, *spec.aliases)]
        for name, path in (*named, *(spec.config.lora_modules or {}).items()):
            if name in seen:
                raise ConfigError(
                    f"two {kinds} have the name {name!r}: {seen[name]} and {path}; give one of them another "
                    "name with --models or --lora-modules"
                )
            seen[name] = path
