"""Reads how a model turns a text into a vector or a score from the settings of sentence-transformers in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.loading.json_files import read_json
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import PoolingConfig, PoolingType
from chairlift.system.input_files import read_text

POOLING_NAMES: Final[dict[str, PoolingType]] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
"""The names in `pooling_mode`, and in the flags `pooling_mode_...`."""


def load_pooling(path: Path, config: ModelConfig) -> PoolingConfig | None:
    """Read the settings in the folder of a model; None if it generates text. A config.json alone has none.

    A folder of sentence-transformers has `modules.json`. An encoder without it computes the mean of its hidden states,
    as sentence-transformers does.

    Raises:
        ModelLoadError: a module or an option is not supported.
    """
    encoder = config.encoder
    if encoder is not None and encoder.classifier is not None:
        return PoolingConfig("score", max_seq_length=_max_seq_length(path))
    modules = _read_modules(path / "modules.json")
    if not modules:
        return None if encoder is None else PoolingConfig("embed", max_seq_length=_max_seq_length(path))
    pooling: PoolingType = "mean"
    normalize = False
    for kind, folder in modules:
        if kind == "Pooling":
            pooling = _read_pooling(path / folder / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelLoadError(
                f"{path / 'modules.json'}: has a module {kind}, which is not supported; supported are "
                "Transformer, Pooling and Normalize"
            )
    if encoder is None and pooling != "last":
        raise ModelLoadError(
            f"{path}: pooling is {pooling!r}, and a decoder ({config.name}) supports the last token only"
        )
    file = path / "config_sentence_transformers.json"
    if (prompt := read_json(file).get("default_prompt_name")) is not None:
        raise ModelLoadError(
            f"{file}: default_prompt_name={prompt!r} is not supported: remove it, and write the prompt before the texts"
        )
    return PoolingConfig("embed", pooling, normalize, _max_seq_length(path))


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    try:
        modules: Any = json.loads(read_text(file))
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{file}: cannot be read as a list of modules ({error}); download it again") from error


def _read_pooling(file: Path) -> PoolingType:
    settings = read_json(file)
    flag = "pooling_mode_"
    modes = [key.removeprefix(flag) for key, value in settings.items() if key.startswith(flag) and value is True]
    if (name := settings.get("pooling_mode")) is not None:
        modes = [str(name)]
    if len(modes) != 1 or modes[0] not in POOLING_NAMES:
        raise ModelLoadError(f"{file}: pooling must be one of the first token, the last token or the mean, got {modes}")
    return POOLING_NAMES[modes[0]]


def _max_seq_length(folder: Path) -> int | None:
    """The maximum number of tokens in `sentence_bert_config.json`."""
    file = folder / "sentence_bert_config.json"
    settings = read_json(file)
    if settings.get("do_lower_case"):
        raise ModelLoadError(f"{file}: do_lower_case is not supported")
    value = settings.get("max_seq_length")
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ModelLoadError(f"{file}: max_seq_length must be a number, got {value!r}")
    return value
