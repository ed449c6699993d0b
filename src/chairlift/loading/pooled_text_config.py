"""Reads how texts become the tokens of a model that computes vectors or scores: limits, prompts and chat template."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from chairlift.loading.json_files import read_json
from chairlift.models.pooling import PooledTextConfig
from chairlift.models.reading.config_fields import ConfigFields

logger = logging.getLogger("chairlift")

SETTINGS: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The file of the module Transformer, by its present name and by those of older versions."""

TASKS: Final = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
    "text-generation": ("causal_logits", "logits"),
    "any-to-any": ("causal_logits", "logits"),
}
"""The tasks of the module -> the name of its result, and the output of the model that this is."""

NEUTRAL: Final = ("unpad_inputs", "query_length", "document_length", "query_expansion")
"""Keys without an effect on `encode`: how a batch is computed, and what only queries and documents of ColBERT have."""

LIBRARY_KEYS: Final = {
    "model": "attn_implementation device_map dtype low_cpu_mem_usage torch_dtype trust_remote_code use_safetensors",
    "config": "trust_remote_code use_cache",
    "processor": "clean_up_tokenization_spaces model_max_length padding_side trust_remote_code use_fast",
}
"""The arguments for the loaders of transformers that change no tokens and no vectors, or are read."""
OLD_NAMES: Final = {"model": "model_args", "config": "config_args", "processor": "tokenizer_args"}
SIZE_ARGUMENTS: Final = ("padding", "truncation", "max_length", "return_tensors", "chat_template", "tokenize")
"""Arguments of `apply_chat_template` that are no variables of the template."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """The settings in the file of the module Transformer.

    Attributes:
        task: a key of TASKS.
        has_file: there is such a file.
    """

    config: PooledTextConfig
    task: str = "feature-extraction"
    has_file: bool = False


def tokenizer_text_config(path: Path) -> PooledTextConfig:
    """The text settings of a model without the file of a module Transformer, from the settings of its tokenizer."""
    file = path / "tokenizer_config.json"
    fields = ConfigFields(read_json(file), str(file))
    most, inputs = fields.get("model_max_length"), fields.get("model_input_names")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int | float) or not most >= 1):
        raise fields.error("model_max_length", f"must be a number of at least 1, got {most!r:.100}")
    return PooledTextConfig(
        max_tokens=None if most is None or most > 1 << 30 else int(most),
        cuts_start=fields.choice("truncation_side", ("left", "right"), "right") == "left",
        has_token_types=not isinstance(inputs, list) or "token_type_ids" in inputs,
    )


def read_text_settings(path: Path) -> TextSettings:
    """Read the file of the module Transformer, and the settings of the tokenizer.

    Raises:
        ModelLoadError: a value is invalid, or not supported.
    """
    file = next((path / name for name in SETTINGS if read_json(path / name)), path / SETTINGS[0])
    fields = ConfigFields(read_json(file), str(file))
    task = fields.choice("transformer_task", TASKS, "feature-extraction")
    result, output = TASKS[task]
    fields.allow_only("module_output_name", result, f"the result of {task} is {result}")
    fields.allow_only("tokenizer_name_or_path", None, "the tokenizer must be in the folder of the model")
    fields.ignore("do_lower_case")  # `lowers_case` reads it.
    config = replace(tokenizer_text_config(path), message_format=_message_format(fields, output))
    config = _with_library_arguments(fields, config)
    if fields.get("max_seq_length") is not None:
        config = replace(config, max_tokens=fields.integer("max_seq_length"))
    config = _with_processing(fields, config)
    log_neutral(fields, NEUTRAL)
    reject_unknown(fields)
    return TextSettings(config, task, file.is_file())


def static_text_settings(folder: Path) -> TextSettings:
    """The settings of a StaticEmbedding, which reads tokenizer.json alone, with its truncation."""
    file = folder / "tokenizer.json"
    cut = ConfigFields(read_json(file), str(file)).mapping("truncation")
    if cut is None:
        return TextSettings(PooledTextConfig(adds_special_tokens=False))
    cuts_start = cut.choice("direction", ("Left", "Right"), "Right") == "Left"
    return TextSettings(PooledTextConfig(cut.integer("max_length"), adds_special_tokens=False, cuts_start=cuts_start))


def lowers_case(path: Path) -> bool:
    """Whether the module Transformer lowers the case of texts before the tokenizer does anything."""
    if not (path / "modules.json").is_file():
        return False
    return any(ConfigFields(read_json(path / name), str(path / name)).flag("do_lower_case", False) for name in SETTINGS)


def _message_format(fields: ConfigFields, output: str) -> Any:
    """The form of messages, if texts are rendered with the chat template."""
    kinds = fields.mapping("modality_config")
    if kinds is None:
        return None
    kinds.ignore(*kinds.unread())  # Other inputs than texts.
    text, message = kinds.mapping("text"), kinds.mapping("message")
    if (used := text if message is None else message) is None:
        raise fields.error("modality_config", "has neither text nor message: the model reads no texts")
    for each in filter(None, (text, message)):
        each.ignore("method", "method_output_name", "format")
    used.allow_only("method", "forward", "texts are computed by the model itself")
    used.allow_only("method_output_name", output, "only this output is computed")
    return None if message is None else used.choice("format", ("flat", "structured"), "structured")


def _with_library_arguments(fields: ConfigFields, config: PooledTextConfig) -> PooledTextConfig:
    for kind, old in OLD_NAMES.items():
        for key in (f"{kind}_kwargs", old):
            given = fields.mapping(key)
            if given is None:
                continue
            if kind == "processor" and given.get("model_max_length") is not None:
                config = replace(config, max_tokens=given.integer("model_max_length"))
            log_neutral(given, LIBRARY_KEYS[kind].split())
    return config


def _with_processing(fields: ConfigFields, config: PooledTextConfig) -> PooledTextConfig:
    """Apply the arguments for calls of the tokenizer and of the chat template."""
    given = fields.mapping("processing_kwargs")
    if given is None:
        return config
    given.ignore("image", "audio", "video")
    text, common, template = (given.mapping(name) for name in ("text", "common", "chat_template"))
    if text is not None:
        if text.get("truncation", True) not in (True, "longest_first"):
            raise text.error("truncation", f"is {text.get('truncation')!r}, and only longest_first is supported")
        most = None if text.get("max_length") is None else text.integer("max_length")
        config = replace(config, max_tokens=most or config.max_tokens)
        config = replace(config, adds_special_tokens=text.flag("add_special_tokens", True))
        text.ignore("padding", "pad_to_multiple_of", "padding_side", "return_attention_mask", "logits_to_keep")
    if common is not None:
        common.ignore("return_tensors", "padding", "padding_side")
    if template is not None:
        for key in SIZE_ARGUMENTS:
            template.allow_only(key, None, "only variables of the template are supported here")
        restores = template.flag("restore_suffix", True)
        config = replace(config, restores_suffix=restores, template_kwargs=template.unread())
        template.ignore(*template.unread())
    return config


def log_neutral(fields: ConfigFields, neutral: Collection[str]) -> None:
    """Name those of these fields in the log that nothing has read, and that have a value."""
    if found := [name for name in fields.unread() if name in neutral]:
        logger.info("%s: has no effect on vectors and scores: %s", fields.source, ", ".join(found))
    fields.ignore(*found)


def reject_unknown(fields: ConfigFields) -> None:
    """Raise ModelLoadError if nothing has read a field, here or in a nested object."""
    fields.reject_undeclared("reader of modules")
