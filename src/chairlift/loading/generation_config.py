"""Sampling defaults of a model: `generation_config.json` of its folder, or `general.sampling.*` of its GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError, RequestError
from chairlift.loading.json_files import read_json
from chairlift.sampling_params import SamplingDefaults, SamplingParams

logger = logging.getLogger("chairlift")

FILE_NAME: Final = "generation_config.json"
FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
GGUF_PREFIX: Final = "general.sampling."
GGUF_FIELDS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key of GGUF metadata (llama.cpp) after the prefix -> field."""


def load_sampling_defaults(
    model_defaults: Callable[[], SamplingDefaults], generation_config: str, override: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """Read the sampling defaults of a model, with the meaning of vLLM's `get_diff_sampling_param`.

    Args:
        model_defaults: reads the defaults in the files of the model.
        generation_config: `auto` calls it; `vllm` reads none; else a folder with FILE_NAME.
        override: values that replace what the files contain.

    A value of a file that is out of range is not applied, and a warning names it: the model can be served without it.

    Raises:
        ModelLoadError: a file cannot be read.
        ConfigError: the folder has no such file, or an overriding value is unknown or out of range.
    """
    folder = Path(generation_config).expanduser()
    if generation_config == "vllm":
        found = SamplingDefaults()
    elif generation_config == "auto":
        found = model_defaults()
    elif (folder / FILE_NAME).is_file():
        found = read_folder_defaults(folder)
    else:
        raise ConfigError(
            f"generation_config must be auto, vllm or a folder with {FILE_NAME}; got {str(folder)!r}, which has none"
        )
    return found.updated(_overriding(override or {}))


def read_gguf_defaults(metadata: Mapping[str, Any], path: Path) -> SamplingDefaults:
    """Read the sampling defaults in the metadata of a GGUF file; messages name its path."""
    given = {key.removeprefix(GGUF_PREFIX): value for key, value in metadata.items() if key.startswith(GGUF_PREFIX)}
    if unsupported := sorted(given.keys() - GGUF_FIELDS.keys()):
        names = ", ".join(GGUF_PREFIX + key for key in unsupported)
        logger.warning("%s: these sampling defaults are not supported and not applied: %s", path, names)
    values = {
        f"{GGUF_PREFIX}{key}": (field, _shortest(given[key])) for key, field in GGUF_FIELDS.items() if key in given
    }
    return _valid_defaults(path, values)


def _shortest(value: Any) -> Any:
    """The decimal number that a 32-bit float of the file was written from."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_folder_defaults(folder: Path) -> SamplingDefaults:
    """Read the sampling defaults in FILE_NAME of a folder; without the file there are none."""
    file = folder / FILE_NAME
    values = read_json(file)
    return _valid_defaults(file, {field: (field, values[field]) for field in FIELDS if values.get(field) is not None})


def _valid_defaults(file: Path, given: Mapping[str, tuple[str, Any]]) -> SamplingDefaults:
    """The defaults without those that are out of range; `given` has field and value by the key in the file."""
    valid = {}
    for key, (field, value) in given.items():
        try:
            valid[field] = _check(field, value, f"{file}: {key}")
        except ConfigError as error:
            logger.warning("%s; it is not applied", error)
    return SamplingDefaults(**valid)


def _overriding(values: Mapping[str, Any]) -> SamplingDefaults:
    if unknown := sorted(values.keys() - set(FIELDS)):
        raise ConfigError(f"override_generation_config may have {', '.join(FIELDS)}; got {', '.join(unknown)}")
    given = {field: value for field, value in values.items() if value is not None}
    place = "override_generation_config: "
    return SamplingDefaults(**{name: _check(name, value, place + name) for name, value in given.items()})


def _check(field: str, value: Any, place: str) -> Any:
    """Return a value that is valid as a sampling parameter. The ConfigError has the limits of `SamplingParams`."""
    name = "max_tokens" if field == "max_new_tokens" else field
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        raise ConfigError(f"{place}{str(error).removeprefix(name)}; correct it") from None
    return value
