"""Builds the engine of an encoder: it has no KV memory, and computes each text in one step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

import torch

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.engine.startup.loaded_model import set_threads
from chairlift.engine.startup.memory_plan import encoder_token_budget, plan_weights
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.kernels.kernel_memory import total
from chairlift.loading.file_weights import FileWeights
from chairlift.loading.pooling_config import PoolingConfig, load_pooling_config
from chairlift.loading.random_weights import RandomWeights
from chairlift.loading.resolve import ModelFiles, load_tokenizer, matrix_formats, open_weights
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.declaration import ModelConfig
from chairlift.models.encoder import EncoderModel
from chairlift.worker.encoder_runner import EncoderRunner
from chairlift.worker.memory import format_memory

logger = logging.getLogger("chairlift")


UNUSED_OPTIONS: Final = (
    "kv_cache_memory_bytes",
    "num_kv_blocks",
    "kv",
    "kv_arena",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "prefix_cache_dir",
    "speculative_config",
    "lora_modules",
    "max_loras",
    "record_trace",
    "classifier_from_token",
)
"""Options of KV memory, of generation and of adapters. An encoder has none of them."""


@dataclass(slots=True)
class LoadedEncoder:
    """An encoder with its tokenizer; the attributes are those of `LoadedModel`."""

    files: ModelFiles
    config: ModelConfig
    model: EncoderModel
    choice: KernelChoice
    tokenizer: Tokenizer
    pooling: PoolingConfig
    weight_bytes: int
    grammars: None = None

    @property
    def name(self) -> str:
        return self.files.name


def load_encoder(config: EngineConfig, files: ModelFiles, model_config: ModelConfig) -> LoadedEncoder:
    """Read and build an encoder.

    Raises:
        ModelLoadError: the model cannot be read.
        ConfigError: an option cannot be combined with an encoder.
    """
    defaults = EngineConfig()
    for name in UNUSED_OPTIONS:
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(f"{name} has no use for {files.name!r}, an encoder: remove it")
    if config.device != "cpu" or config.batching != "continuous":
        raise ConfigError(
            f"model {files.name!r} is an encoder, which runs on device=cpu with batching=continuous, got "
            f"device={config.device} and batching={config.batching}"
        )
    if config.skip_tokenizer_init:
        raise ConfigError(f"skip_tokenizer_init cannot be combined with {files.name!r}, an encoder that reads texts")
    pooling = load_pooling_config(files, model_config)
    assert pooling is not None, "an encoder has a kind of pooling"
    choice = choose_kernels(config, model_config.dtype)
    num_threads = set_threads(config.num_threads, choice)
    dtype = getattr(torch, choice.dtype)
    tokenizer = load_tokenizer(files)
    tokenizer.check_vocabulary(files.name, model_config.vocab_size)
    weights: FileWeights | RandomWeights
    if config.load_format == "dummy":
        weights = RandomWeights(model_config, dtype, torch.device("cpu"))
    else:
        weights = open_weights(files, model_config, dtype, torch.device("cpu"))
    model = EncoderModel(
        model_config,
        weights,
        dtype=dtype,
        kernels=choice.kernels,
        quantization=choice.quantization,
        num_threads=num_threads,
    )
    formats = matrix_formats(None if config.load_format == "dummy" else files, model_config)
    planned = total(plan_weights(model_config, choice.memory("cpu"), formats))
    return LoadedEncoder(files, model_config, model, choice, tokenizer, pooling, planned)


def encoder_limits(config: EngineConfig, loaded: LoadedEncoder) -> SchedulerConfig:
    """The limits of the scheduler: no text is longer than a step.

    Raises:
        ConfigError: `max_model_len` exceeds what the model computes, or the token budget is smaller.
    """
    longest = min(loaded.config.max_position_embeddings, loaded.pooling.max_seq_length or 1 << 30)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the {longest} tokens of the model: reduce it")
    max_model_len = config.max_model_len or longest
    budget = encoder_token_budget(config, max_model_len)
    limits = replace(config, max_num_batched_tokens=budget).scheduler_config(max_model_len)
    return replace(limits, is_pooling=True, enable_chunked_prefill=False)


def make_encoder_runner(loaded: LoadedEncoder) -> EncoderRunner:
    """The executor of an encoder."""
    sep = loaded.tokenizer.special_tokens.get("sep_token")
    return EncoderRunner(loaded.model, loaded.pooling, None if sep is None else loaded.tokenizer.token_to_id(sep))


def log_encoder(loaded: LoadedEncoder, limits: SchedulerConfig) -> None:
    """Log what was loaded."""
    pooling, config = loaded.pooling, loaded.config
    what = "scores of pairs of texts" if pooling.task == "score" else f"vectors of {config.hidden_size} values"
    kind = (
        "" if pooling.task == "score" else f" ({pooling.pooling} pooling{', normalized' if pooling.normalize else ''})"
    )
    logger.info(
        f"{loaded.name} ({config.name}, {config.num_layers} layers) on cpu, kernels: {loaded.choice.description}; "
        f"computes {what}{kind}"
    )
    logger.info(
        f"weights: {format_memory(loaded.weight_bytes)}; texts of at most {limits.max_model_len} tokens, "
        f"max_num_seqs={limits.max_num_seqs} and max_num_batched_tokens={limits.max_num_batched_tokens} in a step"
    )
