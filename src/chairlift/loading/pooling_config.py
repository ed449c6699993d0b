"""Reads how a model turns a text into a vector or a score from the settings of sentence-transformers in its folder.

The keys and their defaults are those of sentence-transformers 6.2. A key that changes a vector is honoured or is an
error, and one without an effect is named in the log.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from chairlift.errors import ModelLoadError
from chairlift.loading.json_files import read_json
from chairlift.loading.pooled_text_config import (
    TextSettings,
    log_neutral,
    read_text_settings,
    reject_unknown,
    static_text_settings,
    tokenizer_text_config,
)
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import (
    ROW_ACTIVATIONS,
    PoolingConfig,
    PoolingMode,
    RowStep,
    Similarity,
)
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.system.input_files import read_text

logger = logging.getLogger("chairlift")

OLD_MODES: Final[dict[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags of older folders, in the order in which their rows are joined."""

STATIC: Final = "StaticEmbedding"
SETTINGS: Final = "config_sentence_transformers.json"
SUPPORTED: Final = ("Transformer", STATIC, "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout", "LogitScore")
TOKENS, SENTENCE, SCORES = "token_embeddings", "sentence_embedding", "scores"


class Module(NamedTuple):
    """An entry of modules.json: its class, and the folder of its files below that of the model."""

    kind: str
    folder: str


def read_modules(path: Path) -> list[Module]:
    """Read modules.json; empty without one.

    Raises:
        ModelLoadError: it cannot be read, or a folder is outside of that of the model.
    """
    file = path / "modules.json"
    try:
        entries: Any = json.loads(read_text(file))
        modules = [Module(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{file}: cannot be read as a list of modules ({error}); download it again") from error
    for module in modules:
        if Path(module.folder).is_absolute() or ".." in Path(module.folder).parts:
            raise ModelLoadError(f"{file}: path is {module.folder!r}, which must be below the folder of the model")
        if module.kind not in SUPPORTED:
            supported = ", ".join(SUPPORTED)
            raise ModelLoadError(
                f"{file}: has a module {module.kind}, which is not supported; supported are {supported}"
            )
    return modules


def static_embedding_folder(path: Path) -> Path | None:
    """The folder of the vectors of tokens, if the first module of the model is a StaticEmbedding."""
    modules = read_modules(path) if path.is_dir() else []
    return path / modules[0].folder if modules and modules[0].kind == STATIC else None


def load_pooling(path: Path, config: ModelConfig) -> PoolingConfig | None:
    """Read the settings in the folder of a model; None if it generates text. A config.json alone has none.

    A folder of sentence-transformers has `modules.json`. An encoder without it computes the mean of its hidden states,
    and a cross-encoder its score, as in sentence-transformers.

    Raises:
        ModelLoadError: a module or an option is not supported.
    """
    encoder, size = config.encoder, config.hidden_size
    modules = read_modules(path)
    if modules:
        return _PipelineReader(path, config, modules).read()
    if encoder is None:
        return None
    text = tokenizer_text_config(path)
    if encoder.classifier is None:
        return PoolingConfig("embed", size, text)
    return PoolingConfig("score", size, text, activation=_classifier_activation(path, None))


class _PipelineReader:
    """Reads the settings of a model with `modules`."""

    def __init__(self, path: Path, config: ModelConfig, modules: list[Module]) -> None:
        self._path, self._config, self._modules = path, config, modules
        self._token_steps: list[RowStep] = []
        self._steps: list[RowStep] = []
        self._modes: tuple[PoolingMode, ...] | None = None
        self._includes_prompt = True
        self._logits: tuple[int | None, int] | None = None
        self._row, self._size = TOKENS, config.hidden_size

    def read(self) -> PoolingConfig:
        first = self._modules[0].kind
        is_static, kinds = first == STATIC, [module.kind for module in self._modules[1:]]
        if first not in ("Transformer", STATIC) or {"Transformer", STATIC} & {*kinds}:
            raise self._error("must begin with the only Transformer or StaticEmbedding")
        if not is_static and self._modules[0].folder not in ("", "."):
            raise self._error(f"has the Transformer in {self._modules[0].folder!r}: move its files to the main folder")
        text = (
            static_text_settings(self._path / self._modules[0].folder) if is_static else read_text_settings(self._path)
        )
        if is_static:
            self._modes, self._row = ("mean",), SENTENCE
        for module in self._modules[1:]:
            self._read_module(module)
        return self._config_of(text)

    def _config_of(self, text: TextSettings) -> PoolingConfig:
        settings = ConfigFields(read_json(self._path / SETTINGS), str(self._path / SETTINGS))
        kind = settings.choice("model_type", ("SentenceTransformer", "CrossEncoder"), "SentenceTransformer")
        prompt, activation = self._prompt(settings), settings.get("activation_fn")
        similarity: Any = settings.choice("similarity_fn_name", get_args(Similarity), "cosine")
        num_kept = None if settings.get("truncate_dim") is None else settings.integer("truncate_dim")
        settings.ignore("__version__")
        log_neutral(settings, settings.unread())
        self._check_result(kind, text)
        if prompt and not self._includes_prompt and text.config.message_format is not None:
            raise self._error("has include_prompt=false, which has no meaning with a chat template: set it to true")
        is_embedder = kind == "SentenceTransformer"
        return PoolingConfig(
            "embed" if is_embedder else "score",
            self._size,
            replace(text.config, prompt=prompt),
            modes=self._modes or ("lasttoken",),
            token_steps=tuple(self._token_steps),
            steps=tuple(self._steps),
            includes_prompt=self._includes_prompt or not prompt,
            num_kept=num_kept if is_embedder else None,
            similarity=similarity,
            classifier_tokens=self._logits,
            has_own_prompt=self._logits is not None and not text.has_file,
            activation=_classifier_activation(self._path, activation),
        )

    def _check_result(self, kind: str, text: TextSettings) -> None:
        """Check that the modules compute what a model of this kind returns, from what the Transformer computes."""
        row, encoder = self._row, self._config.encoder
        if text.has_file or self._logits is None:
            needed = "text-generation" if self._logits is not None else "feature-extraction"
            if row == TOKENS and self._logits is None and kind == "CrossEncoder":
                needed = "sequence-classification"
            if text.task.replace("any-to-any", "text-generation") != needed:
                raise self._error(f"needs transformer_task={needed} of the Transformer, got {text.task}")
        has_head = self._logits is not None or (encoder is not None and encoder.classifier is not None)
        expected = (TOKENS if has_head else SCORES) if kind == "CrossEncoder" else SENTENCE
        if row != expected or (row == SCORES and self._size != 1):
            raise self._error(
                f"computes {row} of {self._size} values, and model_type={kind} needs {expected}; the folder is "
                "incomplete, or its head has several labels"
            )

    def _prompt(self, settings: ConfigFields) -> str:
        """The prompt that is written before every text."""
        name, prompts = settings.get("default_prompt_name"), settings.get("prompts", {})
        others = [key for key in prompts if key != name and prompts[key]] if isinstance(prompts, dict) else []
        if others:
            listed = ", ".join(map(repr, others))
            logger.info("%s: the prompts %s are not added: write them before the texts", settings.source, listed)
        if name is None:
            return ""
        if not isinstance(prompts, dict) or not isinstance(prompts.get(str(name)), str):
            raise settings.error("default_prompt_name", f"is {name!r}, and prompts has no text with this name")
        return str(prompts[name])

    def _read_module(self, module: Module) -> None:
        file = self._path / module.folder / "config.json"
        fields = ConfigFields(read_json(file), str(file))
        read = {"Pooling": self._pooling, "LogitScore": self._logit_score, "Dropout": self._dropout}.get(module.kind)
        if read is not None:
            read(fields)
        else:
            self._row_step(module, fields)
        reject_unknown(fields)

    def _pooling(self, fields: ConfigFields) -> None:
        if self._row != TOKENS:
            raise self._error("has a module Pooling whose input is not the states of tokens")
        old = {name: fields.flag(name, False) for name in OLD_MODES}
        named = fields.get("pooling_mode", [OLD_MODES[name] for name, is_on in old.items() if is_on] or "mean")
        modes = [named] if isinstance(named, str) else named
        if not isinstance(modes, list) or not modes or not all(mode in get_args(PoolingMode) for mode in modes):
            raise fields.error("pooling_mode", f"must be of {', '.join(get_args(PoolingMode))}, got {named!r}")
        for key in ("embedding_dimension", "word_embedding_dimension"):
            fields.allow_only(key, self._size, f"rows have {self._size} values here")
        self._modes = tuple(modes)
        self._includes_prompt = fields.flag("include_prompt", True)
        self._row, self._size = SENTENCE, self._size * len(modes)

    def _logit_score(self, fields: ConfigFields) -> None:
        most = self._config.vocab_size - 1
        fields.allow_only("module_input_name", "causal_logits", "scores are read from the logits of the model")
        is_alone = fields.get("false_token_id") is None
        negative = None if is_alone else fields.integer("false_token_id", low=0, high=most)
        self._logits = negative, fields.integer("true_token_id", low=0, high=most)
        if len(self._modules) != 2 or self._config.encoder is not None:
            raise self._error("must be a decoder and LogitScore alone")

    def _dropout(self, fields: ConfigFields) -> None:
        fields.ignore("dropout")

    def _row_step(self, module: Module, fields: ConfigFields) -> None:
        """Read a module that changes the states of tokens before Pooling, or the row behind it."""
        name = SENTENCE if module.kind != "LayerNorm" else self._row
        given = fields.choice("module_input_name", (TOKENS, SENTENCE), name)
        output = fields.choice("module_output_name", (TOKENS, SENTENCE, SCORES), given)
        if module.kind == "Normalize" and given != self._row and given == output:
            return  # It normalizes what no later module reads.
        if given != self._row or output not in (given, SCORES):
            raise self._error(f"has a module {module.kind} from {given} to {output} behind {self._row}")
        step = self._step(module, fields)
        (self._token_steps if self._row == TOKENS else self._steps).append(step)
        self._row, self._size = output, step.size

    def _step(self, module: Module, fields: ConfigFields) -> RowStep:
        size, file = self._size, str(self._path / module.folder / "model.safetensors")
        if module.kind == "Normalize":
            return RowStep("normalize", size, size)
        if module.kind == "LayerNorm":
            fields.integer("dimension", low=size, high=size)
            return RowStep("layer_norm", size, size, file)
        fields.integer("in_features", low=size, high=size)
        name = fields.get("activation_function", "torch.nn.modules.activation.Tanh")
        return RowStep(
            "dense",
            size,
            fields.integer("out_features"),
            file,
            row_activation(name, fields, "activation_function"),
            fields.flag("bias", True),
            fields.flag("use_residual", False),
        )

    def _error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path / 'modules.json'}: {problem}")


def _classifier_activation(path: Path, name: Any) -> str:
    """The activation of scores: of the settings, or of config.json as older versions wrote it."""
    fields = ConfigFields(read_json(path / "config.json"), str(path / "config.json"))
    nested = fields.mapping("sentence_transformers")
    if name is None and nested is not None:
        name = nested.get("activation_fn")
    if name is None:
        name = fields.get("sbert_ce_default_activation_function", "torch.nn.modules.activation.Sigmoid")
    return row_activation(name, fields, "activation_fn")


def row_activation(name: Any, fields: ConfigFields, key: str) -> str:
    """The name in ROW_ACTIVATIONS of a class of torch, such as `torch.nn.modules.activation.Tanh`."""
    found = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.") or found not in ROW_ACTIVATIONS:
        supported = ", ".join(sorted(ROW_ACTIVATIONS))
        raise fields.error(key, f"is {name!r}, which is not supported; supported of torch.nn: {supported}")
    return found
