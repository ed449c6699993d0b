"""LoadedModel: a model on its device, as a decoder with KV memory or an encoder; `load_model` loads it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from chairlift.config import QUANTIZATIONS, EngineConfig
from chairlift.counts import counted
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.pooled_prompts import with_tokenizer
from chairlift.engine.startup.pooling_options import read_pooling
from chairlift.engine.startup.threads import set_threads
from chairlift.engine.startup.weight_plan import MatrixFormats, plan_lora, plan_weights
from chairlift.errors import ConfigError
from chairlift.grammar.compiler import GrammarCompiler
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.kernels.kernel_memory import MemoryItem, total
from chairlift.kernels.lora import LoraAdapters
from chairlift.loading.file_weights import FileWeights
from chairlift.loading.generation_config import load_sampling_defaults
from chairlift.loading.model_source import CONFIG, ModelSource, declared_formats, encoder_error
from chairlift.loading.resolve import resolve_model
from chairlift.loading.row_steps import load_row_step
from chairlift.loading.text.end_tokens import add_listed_ends
from chairlift.loading.text.template_check import MAX_NAMED, add_turn_ends
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.decoder import DecoderModel, build_model
from chairlift.models.encoder import EncoderModel
from chairlift.models.kv_layout import KVLayout
from chairlift.models.pooling import PoolingConfig
from chairlift.models.random_weights import RandomWeights
from chairlift.models.text_pooling import RowFunctions
from chairlift.sampling_params import SamplingDefaults
from chairlift.step_time import RowTime, StepTime
from chairlift.system.memory_amounts import format_memory
from chairlift.system.memory_limits import is_out_of_memory
from chairlift.worker.memory import available_memory, total_memory

logger = logging.getLogger("chairlift")


@dataclass(slots=True, kw_only=True)
class LoadedModel(ABC):
    """The weights of a model with its tokenizer, which engines over it share.

    Attributes:
        engine_config: the configuration that it was loaded for.
        name: its name in responses.
        files: its files with weights, and its config.json if it is a folder.
        choice: its kernels and data types.
        tokenizer: its tokenizer, or NoTokenizer with `skip_tokenizer_init`.
        formats: the formats of the matrices in its files.
        planned_weights: the planned memory of its weights.
        pooling: how it computes vectors; None if it generates text.
        sampling_defaults: the sampling parameters of requests that do not set them.
        grammars: the compiler of structured outputs; None if the model does not generate text, or there is no tokenizer
            or EOS token.
    """

    engine_config: EngineConfig
    name: str
    files: list[Path]
    config: ModelConfig
    device: torch.device
    choice: KernelChoice
    tokenizer: Tokenizer | NoTokenizer
    formats: MatrixFormats
    planned_weights: list[MemoryItem]
    pooling: PoolingConfig | None
    sampling_defaults: SamplingDefaults
    grammars: GrammarCompiler | None = None
    model: DecoderModel | EncoderModel = field(init=False)

    @abstractmethod
    def read_weights(self, weights: FileWeights | RandomWeights, num_callers: int) -> None:
        """Build the model from its weights; `num_callers` threads may call torch at the same time."""

    def check_memory(self) -> None:
        """Raise ConfigError if the weights need more than the whole memory."""
        num_bytes, limit = total(self.planned_weights), total_memory(self.device)
        if num_bytes <= limit:
            return
        hint = "use a smaller model"
        if self.choice.kernels == "native":
            smaller = {option: replace(self.choice, quantization=option).memory("cpu") for option in QUANTIZATIONS}
            sizes = {option: total(plan_weights(self.config, each, self.formats)) for option, each in smaller.items()}
            fitting = {option: size for option, size in sizes.items() if size <= limit}
            if (best := max(fitting, key=fitting.__getitem__, default=None)) is not None:
                hint = f"quantization={best} takes {format_memory(fitting[best])}"
        raise ConfigError(
            f"model {self.name!r}: the weights take {format_memory(num_bytes)}, more than the {format_memory(limit)} "
            f"that this process may use; {hint}"
        )

    def describe(self) -> str:
        """A line for the log."""
        config, choice = self.config, self.choice
        types = "" if config.encoder else f"; activations in {choice.dtype}, K and V in {choice.kv_cache_dtype}"
        kernels = f"kernels: {choice.description}{types}"
        return f"{self.name} ({config.name}, {config.num_layers} layers) on {self.device}, {kernels}"

    def row_functions(self) -> RowFunctions:
        """The functions of rows of a model that computes vectors or scores; raises ModelLoadError."""
        assert self.pooling is not None, "the model computes vectors or scores"
        return RowFunctions(self.pooling, partial(load_row_step, device=self.device))

    @property
    def lora(self) -> LoraAdapters | None:
        """The LoRA adapters of the model; None if it has none."""
        return self.model.lora if isinstance(self.model, DecoderModel) else None


@dataclass(slots=True, kw_only=True)
class LoadedEncoder(LoadedModel):
    """An encoder, which computes each text in one step."""

    model: EncoderModel = field(init=False)
    tokenizer: Tokenizer
    pooling: PoolingConfig

    def read_weights(self, weights: FileWeights | RandomWeights, num_callers: int) -> None:
        self.model = EncoderModel(
            self.config,
            weights,
            dtype=_torch_dtype(self.choice.dtype),
            kernels=self.choice.kernels,
            quantization=self.choice.quantization,
            num_threads=num_callers,
        )


@dataclass(slots=True, kw_only=True)
class LoadedDecoder(LoadedModel):
    """A decoder with its KV memory.

    Only one of the engines over it may have unfinished requests, and prefixes that another one has cached in KV memory
    are lost.

    Attributes:
        kv_cache_plan, kv_layout: the plan of its KV memory and the groups of its layers; None before the first engine.
        step_time, row_time: the time of steps that the first engine has measured, for all engines.
        predictor_row_time: the same of the predictor.
        draft: the draft model of speculative decoding; None if no engine has needed it.
    """

    model: DecoderModel = field(init=False)
    kv_cache_plan: KVCachePlan | None = None
    kv_layout: KVLayout | None = None
    step_time: StepTime | None = None
    row_time: RowTime | None = None
    predictor_row_time: RowTime | None = None
    draft: LoadedDecoder | None = None

    def read_weights(self, weights: FileWeights | RandomWeights, num_callers: int) -> None:
        self.model = build_model(
            self.config,
            weights,
            dtype=_torch_dtype(self.choice.dtype),
            device=self.device,
            kernels=self.choice.kernels,
            quantization=self.choice.quantization,
            kv_cache_dtype=_torch_dtype(self.choice.kv_cache_dtype),
            max_model_len=self.engine_config.max_model_len,
            has_pooling=self.pooling is not None and not self.pooling.needs_head,
            max_loras=self.engine_config.num_loras,
            max_lora_rank=self.engine_config.max_lora_rank,
        )
        weights.check_all_read()

    def provide_kv_cache(self, plan: KVCachePlan, layout: KVLayout) -> None:
        """Allocate KV memory and recurrent states for the plan. Existing memory is kept if it has the same layout,
        blocks of the same size, and at least as many of them and of states.

        Raises:
            ConfigError: there is not enough memory.
        """
        held = self.kv_cache_plan
        is_alike = held is not None and held.block_size == plan.block_size and self.kv_layout == layout
        has_states = held is not None and held.num_state_slots >= plan.num_state_slots
        if held is not None and is_alike and has_states and held.num_blocks >= plan.num_blocks:
            return
        limit = total_memory(self.device)
        if plan.num_bytes > limit:  # the system may still promise it, and kill the process when it is written
            raise _kv_cache_too_large(plan, f"more than the {format_memory(limit)} that this process may use")
        # Pages are only claimed when they are first written.
        if self.device.type == "cpu" and plan.num_bytes > (available := available_memory(self.device)):
            logger.warning(
                f"the KV pool takes {format_memory(plan.num_bytes)} when it is full, but only "
                f"{format_memory(available)} are free now, so the system may kill the engine: lower "
                "kv_cache_memory_bytes or free some memory"
            )
        try:
            self.model.allocate_kv_cache(plan.num_blocks, plan.block_size, layout)
            self.model.allocate_states(plan.num_state_slots)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and not is_out_of_memory(error):
                raise
            raise _kv_cache_too_large(plan, f"which cannot be allocated ({error})") from None
        self.kv_cache_plan, self.kv_layout = plan, layout


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, read and build the model, without KV memory.

    What would prevent it is checked before weights are read: architecture, formats of the tensors, tokenizer, memory.

    Raises:
        ModelLoadError: the model cannot be found, read or run.
        ConfigError: this machine lacks a device, dtype or kernel set, an option does not fit the model, or a log file
            cannot be written.
    """
    config.check_files()
    source = resolve_model(config.model, accept_terms=config.accept_terms)
    model_config, pooling = read_pooling(config, source, source.config(needs_predictor=config.needs_predictor))
    device = _find_device(config)
    defaults = load_sampling_defaults(source.defaults, config.generation_config, config.override_generation_config)
    choice = choose_kernels(config, model_config.dtype, is_pooling=pooling is not None)
    num_callers = set_threads(config.num_threads, choice)
    weights, formats = _open_weights(config, source, model_config, choice, device)
    tokenizer = NoTokenizer() if config.skip_tokenizer_init else source.tokenizer()
    model_config, pooling, grammars = _apply_tokenizer(config, source.name, tokenizer, model_config, pooling)
    planned = plan_weights(model_config, choice.memory(device.type), formats)
    kind: type[LoadedModel] = LoadedDecoder if model_config.encoder is None else LoadedEncoder
    loaded = kind(
        engine_config=config,
        name=source.name,
        files=[path for path in (*source.weight_files(), source.path / CONFIG) if path.is_file()],
        config=model_config,
        device=device,
        choice=choice,
        tokenizer=tokenizer,
        formats=formats,
        planned_weights=planned + plan_lora(model_config, config, choice.dtype),
        pooling=pooling,
        sampling_defaults=defaults,
        grammars=grammars,
    )
    loaded.check_memory()
    loaded.read_weights(weights, num_callers)
    for line in (*weights.notes(), loaded.describe()):
        logger.info("%s", line)
    return loaded


def load_decoder(config: EngineConfig) -> LoadedDecoder:
    """Load a model with KV memory; arguments and errors as for `load_model`.

    Raises:
        ConfigError: it is an encoder.
    """
    loaded = load_model(config)
    if not isinstance(loaded, LoadedDecoder):
        raise encoder_error(loaded.name)
    return loaded


def _find_device(config: EngineConfig) -> torch.device:
    """The device of the model. Raises ConfigError if this build of torch does not find it."""
    if config.device_type == "cuda":
        if not torch.cuda.is_available():
            found = f"this build of torch ({torch.__version__}) finds no CUDA device"
            raise ConfigError(f"device={config.device}: {found}; use cpu")
        # cuDNN would compile a plan for each new shape, which takes two milliseconds, and shapes change in every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(config.device)


def _open_weights(
    config: EngineConfig, source: ModelSource, model_config: ModelConfig, choice: KernelChoice, device: torch.device
) -> tuple[FileWeights | RandomWeights, MatrixFormats]:
    dtype = _torch_dtype(choice.dtype)
    if config.load_format == "dummy":
        return RandomWeights(model_config, dtype, device), declared_formats(model_config)
    return source.weights(model_config, dtype, device), source.formats(model_config)


def _apply_tokenizer(
    config: EngineConfig,
    name: str,
    tokenizer: Tokenizer | NoTokenizer,
    model_config: ModelConfig,
    pooling: PoolingConfig | None,
) -> tuple[ModelConfig, PoolingConfig | None, GrammarCompiler | None]:
    """Add the tokens that end a turn to the declaration, and the tokens of a classifier to the pooling."""
    if isinstance(tokenizer, Tokenizer):
        _log_tokens_without_row(name, tokenizer, model_config.vocab_size)
    if pooling is not None and config.classifier_from_token is not None:
        tokens = _classifier_tokens(config.classifier_from_token, tokenizer, model_config.vocab_size)
        pooling = replace(pooling, classifier_tokens=tokens)
    if pooling is not None and isinstance(tokenizer, Tokenizer):
        pooling = with_tokenizer(pooling, tokenizer, name)
    if pooling is not None or not isinstance(tokenizer, Tokenizer):
        return model_config, pooling, None
    found = add_listed_ends(add_turn_ends(model_config.eos_token_ids, tokenizer, name), tokenizer, name)
    ends = tuple(token_id for token_id in found if token_id < model_config.vocab_size)
    grammars = GrammarCompiler(lambda: tokenizer, model_config.vocab_size, ends) if ends else None
    return replace(model_config, eos_token_ids=ends), pooling, grammars


def _log_tokens_without_row(name: str, tokenizer: Tokenizer, num_rows: int) -> None:
    """Log a warning if the tokenizer has tokens that the model can neither read nor generate."""
    if missing := tokenizer.tokens_from(num_rows):
        named = ", ".join(map(repr, missing[:MAX_NAMED])) + (", ..." if len(missing) > MAX_NAMED else "")
        logger.warning(
            f"{name}: {counted(len(missing), 'token')} of the tokenizer ({named}) cannot be used, because the "
            f"embedding has only {num_rows:,} rows: no answer contains them, and prompts with them are rejected. If "
            "ordinary text is rejected, use the tokenizer that belongs to the weights"
        )


def _classifier_tokens(texts: Sequence[str], tokenizer: Tokenizer | NoTokenizer, num_rows: int) -> tuple[int, int]:
    """The ids of two tokens.

    Raises:
        ConfigError: a text is not one token of the vocabulary, or there is no tokenizer.
    """
    if isinstance(tokenizer, NoTokenizer):
        raise ConfigError("classifier_from_token needs a tokenizer: remove skip_tokenizer_init")
    ids = []
    for text in texts:
        if (token_id := tokenizer.token_to_id(text)) is None or token_id >= num_rows:
            raise ConfigError(f"classifier_from_token: {text!r} is not a token of the model's vocabulary")
        ids.append(token_id)
    return ids[0], ids[1]


def _kv_cache_too_large(plan: KVCachePlan, why: str) -> ConfigError:
    option = "num_kv_blocks" if plan.limited_by == "num_kv_blocks" else "kv_cache_memory_bytes"
    return ConfigError(
        f"the KV pool of {plan.num_blocks} blocks takes {format_memory(plan.num_bytes)}, {why}: lower {option}"
    )


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
