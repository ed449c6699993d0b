"""Reads how a model turns a text into a vector or a score from the settings of sentence-transformers in its folder, and
checks the options of the engine that depend on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.loading.resolve import ModelFiles
from chairlift.loading.text.hf_tokenizer import read_json
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


ENCODER_LACKS: Final = (
    "kv_cache_memory_bytes",
    "num_kv_blocks",
    "kv",
    "kv_arena",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "prefix_cache_dir",
    "prefix_cache_disk_bytes",
    "speculative_config",
    "lora_modules",
    "max_loras",
    "record_trace",
    "preemption_mode",
    "swap_space",
    "length_predictor",
    "pacing_tokens_per_second",
    "classifier_from_token",
)
"""Options of KV memory, of generation and of adapters. An encoder has none of them."""


def read_pooling(
    config: EngineConfig, files: ModelFiles, model_config: ModelConfig
) -> tuple[ModelConfig, PoolingConfig | None]:
    """The model without a head that it does not need, and its pooling, which is None if it generates text.

    Raises:
        ModelLoadError: as `_load_pooling`.
        ConfigError: an option does not fit the model.
    """
    pooling = _load_pooling(files, model_config)
    if model_config.encoder is not None:
        _check_encoder_options(config, files.name)
    elif config.classifier_from_token is not None:
        if pooling is not None:
            raise ConfigError(f"classifier_from_token has no use for {files.name!r}, which computes vectors: remove it")
        pooling = PoolingConfig("score", "last")
    if pooling is not None and config.record_trace is not None:
        raise ConfigError(f"record_trace records outputs, and {files.name!r} computes vectors: remove record_trace")
    return (model_config if pooling is None else pooling.without_unused_head(model_config)), pooling


def _check_encoder_options(config: EngineConfig, name: str) -> None:
    defaults = EngineConfig()
    for option in ENCODER_LACKS:
        if getattr(config, option) != getattr(defaults, option):
            raise ConfigError(f"{option} has no use for {name!r}, an encoder: remove it")
    if config.device != "cpu" or config.batching != "continuous":
        raise ConfigError(
            f"model {name!r} is an encoder, which runs on device=cpu with batching=continuous, got "
            f"device={config.device} and batching={config.batching}"
        )
    if config.skip_tokenizer_init:
        raise ConfigError(f"skip_tokenizer_init cannot be combined with {name!r}, an encoder that reads texts")


def _load_pooling(files: ModelFiles, config: ModelConfig) -> PoolingConfig | None:
    """Read the settings of a model; None if it generates text.

    A folder of sentence-transformers has `modules.json`. An encoder without it computes the mean of its hidden states,
    as sentence-transformers does.

    Raises:
        ModelLoadError: a module or an option is not supported.
    """
    if config.encoder is not None and config.encoder.classifier is not None:
        return PoolingConfig("score", max_seq_length=_max_seq_length(files.path))
    modules = _read_modules(files.path / "modules.json") if files.kind == "hf" and files.path.is_dir() else []
    if not modules:
        return None if config.encoder is None else PoolingConfig("embed", max_seq_length=_max_seq_length(files.path))
    pooling: PoolingType = "mean"
    normalize = False
    for kind, folder in modules:
        if kind == "Pooling":
            pooling = _read_pooling(files.path / folder / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelLoadError(
                f"{files.path / 'modules.json'}: has a module {kind}, which is not supported; supported are "
                "Transformer, Pooling and Normalize"
            )
    if config.encoder is None and pooling != "last":
        raise ModelLoadError(
            f"{files.path}: pooling is {pooling!r}, and a decoder ({config.name}) supports the last token only"
        )
    settings = read_json(files.path / "config_sentence_transformers.json")
    if settings.get("default_prompt_name") is not None:
        raise ModelLoadError(
            f"{files.path / 'config_sentence_transformers.json'}: default_prompt_name="
            f"{settings['default_prompt_name']!r} is not supported: remove it, and write the prompt before the texts"
        )
    return PoolingConfig("embed", pooling, normalize, _max_seq_length(files.path))


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module."""
    try:
        modules: Any = json.loads(read_text(file))
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except FileNotFoundError:
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
    if not folder.is_dir():
        return None
    settings = read_json(folder / "sentence_bert_config.json")
    if settings.get("do_lower_case"):
        raise ModelLoadError(f"{folder / 'sentence_bert_config.json'}: do_lower_case is not supported")
    value = settings.get("max_seq_length")
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ModelLoadError(f"{folder / 'sentence_bert_config.json'}: max_seq_length must be a number, got {value!r}")
    return value
