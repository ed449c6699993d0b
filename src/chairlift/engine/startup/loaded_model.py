"""A model on its device, with its KV memory: what engines stand on."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

import torch

from chairlift.config import EngineConfig
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.startup.memory_plan import MemoryItem
from chairlift.engine.startup.startup_plan import planned_weights
from chairlift.engine.startup.token_budget import StepTimes
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.grammar.compiler import GrammarCompiler
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.kernels.cpu import load
from chairlift.loading.file_weights import FileWeights
from chairlift.loading.random_weights import RandomWeights
from chairlift.loading.resolve import (
    ModelFiles,
    close_gguf,
    load_config,
    load_tokenizer,
    matrix_formats,
    open_weights,
    resolve_model,
)
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import DecoderModel, build_model
from chairlift.system.control_groups import ControlGroups
from chairlift.worker.kv_cache_plan import KVCachePlan
from chairlift.worker.memory import available_memory, format_memory, total_memory

logger = logging.getLogger("chairlift")

LOADING_OPTIONS: Final = (
    "model",
    "device",
    "dtype",
    "kernels",
    "quantization",
    "kv_cache_dtype",
    "random_weights",
    "skip_tokenizer_init",
    "num_threads",
)
"""The fields of EngineConfig that are settled once a model is loaded."""

MAX_NAMES_SHOWN: Final = 5
"""Tensors that one message names."""

MAX_THREADS: Final = 256
"""kMaxThreads in kernels/cpu/csrc/pool.h."""

CPU_ALLOCATOR_WORDS: Final = ("can't allocate memory", "not enough memory")
"""What torch's allocators on the CPU say in a RuntimeError, on POSIX and on Windows (c10/core/impl/alloc_cpu.cpp)."""


@dataclass(slots=True)
class LoadedModel:
    """Weights and KV memory; tokenizer and grammars once they are asked for. Engines over one loaded model share all of
    it, so only one of them may have unfinished requests, and what an earlier one has cached in KV memory is lost.

    Attributes:
        engine_config: the one it was loaded for.
        choice: the kernels that it runs on, and in which types.
        planned_weights: what it was planned to hold.
        kv_cache_plan: of the KV memory; None before the first engine.
        step_times: as the first engine that asked has measured them; all others go by them too.
    """

    engine_config: EngineConfig
    files: ModelFiles
    config: ModelConfig
    model: DecoderModel
    device: torch.device
    choice: KernelChoice
    planned_weights: list[MemoryItem]
    kv_cache_plan: KVCachePlan | None = None
    step_times: StepTimes | None = None
    _tokenizer: Tokenizer | NoTokenizer | None = None
    _grammars: GrammarCompiler | None = None

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def tokenizer(self) -> Tokenizer | NoTokenizer:
        """Loaded at first use; raises ModelLoadError as `load_tokenizer`."""
        if self._tokenizer is None:
            skip = self.engine_config.skip_tokenizer_init
            self._tokenizer = NoTokenizer() if skip else load_tokenizer(self.files)
        return self._tokenizer

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles structured outputs; None where there is no text, or no token to end an answer with."""
        if self.engine_config.skip_tokenizer_init or not self.config.eos_token_ids:
            return None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._text_tokenizer, self.config.vocab_size, self.config.eos_token_ids)
        return self._grammars

    def _text_tokenizer(self) -> Tokenizer:
        tokenizer = self.tokenizer
        assert isinstance(tokenizer, Tokenizer), "without a tokenizer there are no grammars"
        return tokenizer

    def serves(self, config: EngineConfig) -> bool:
        """Whether the model would be loaded in the same way for `config`."""
        return all(getattr(config, name) == getattr(self.engine_config, name) for name in LOADING_OPTIONS)

    def provide_kv_cache(self, plan: KVCachePlan) -> None:
        """KV memory for all block ids of the pool: what is there, if it has blocks of that size and enough of them.

        Raises:
            ConfigError: there is not so much memory.
        """
        held = self.kv_cache_plan
        if held is not None and held.block_size == plan.block_size and held.num_blocks >= plan.num_blocks:
            return
        total = total_memory(self.device)
        if plan.num_bytes > total:  # the system may well promise it, and end whoever comes to use it
            raise _kv_cache_too_large(plan, f"more than the {format_memory(total)} that this process may use")
        self._warn_of_short_memory(plan)
        try:
            self.model.allocate_kv_cache(plan.num_blocks, plan.block_size)
        except (MemoryError, RuntimeError) as error:
            if not _says_memory_is_short(error):
                raise
            raise _kv_cache_too_large(plan, f"which cannot be had ({error})") from None
        self.kv_cache_plan = plan

    def _warn_of_short_memory(self, plan: KVCachePlan) -> None:
        """Pages of a CPU's pool are claimed when they are first written, which may be days after the start."""
        available = available_memory(self.device)
        if self.device.type == "cpu" and plan.num_bytes > available:
            logger.warning(
                "the KV pool takes %s once it is full, and only %s are free now: the system may kill the engine then; "
                "lower kv_cache_memory or free memory",
                format_memory(plan.num_bytes),
                format_memory(available),
            )


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, read and build the model; no KV memory and no tokenizer yet.

    Raises:
        ModelLoadError: the model cannot be had, read or run; says what would work.
        ConfigError: a device, dtype or kernel set that this machine does not have; a log that cannot be written.
    """
    config.check_files()
    device = _device(config.device)
    files = resolve_model(config.model)
    model_config = load_config(files)
    choice = choose_kernels(config, model_config.dtype)
    _set_threads(config.num_threads, choice)
    dtype = _torch_dtype(choice.dtype)
    weights = _weights(config, files, model_config, dtype, device)
    model = build_model(
        model_config,
        weights,
        dtype=dtype,
        device=device,
        kernels=choice.kernels,
        quantization=choice.quantization,
        kv_cache_dtype=_torch_dtype(choice.kv_cache_dtype),
    )
    _refuse_undeclared_tensors(weights.unused(), files, model_config)
    logger.info(
        "%s (%s, %d layers) on %s, %s kernels; activations in %s, K and V in %s",
        files.name,
        model_config.name,
        model_config.num_layers,
        device,
        choice.kernels,
        choice.dtype,
        choice.kv_cache_dtype,
    )
    formats = matrix_formats(None if config.random_weights else files, model_config)
    planned = planned_weights(model_config, choice, device.type, formats)
    close_gguf()
    return LoadedModel(config, files, model_config, model, device, choice, planned)


def _refuse_undeclared_tensors(names: list[str], files: ModelFiles, model_config: ModelConfig) -> None:
    if not names:
        return
    shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
    raise ModelLoadError(
        f"{files.path}: {len(names)} tensors are not declared by the {model_config.architecture} architecture "
        f"({model_config.name}): {shown}. Without them another model would be computed; take a checkpoint without them"
    )


def _says_memory_is_short(error: Exception) -> bool:
    """Of an allocation that failed. torch has a type of its own for that on a device, and none on the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in CPU_ALLOCATOR_WORDS)


def _kv_cache_too_large(plan: KVCachePlan, why: str) -> ConfigError:
    option = "num_kv_blocks" if plan.limited_by == "num_kv_blocks" else "kv_cache_memory"
    return ConfigError(
        f"the KV pool of {plan.num_blocks} blocks takes {format_memory(plan.num_bytes)}, {why}: lower {option}"
    )


def _device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: this build of torch ({torch.__version__}) sees no CUDA device; use cpu")
    return torch.device(name)


def default_num_threads() -> int:
    """CPUs that this process may run on, and no more than its control groups give it the time of.

    With more threads than that all of them are stopped for the rest of every period, in the middle of a step. A part of
    a CPU is left to the process that answers HTTP.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = ControlGroups().cpu_quota()
    if quota is None or quota >= num_cores:
        return min(num_cores, MAX_THREADS)
    num_threads = min(max(1, int(quota)), MAX_THREADS)
    logger.info("num_threads %d: the control group allows the time of %.3g of %d CPUs", num_threads, quota, num_cores)
    return num_threads


def _set_threads(num_threads: int | None, choice: KernelChoice) -> None:
    """Native kernels have threads of their own, and torch's would only take turns with them."""
    if num_threads is None:
        num_threads = default_num_threads()
    if num_threads > MAX_THREADS:
        raise ConfigError(f"num_threads={num_threads} is more than the {MAX_THREADS} that kernels share work among")
    if choice.kernels == "native":
        load().set_num_threads(num_threads)
        num_threads = 1
    torch.set_num_threads(num_threads)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _weights(
    config: EngineConfig, files: ModelFiles, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> FileWeights | RandomWeights:
    if config.random_weights:
        return RandomWeights(model_config, dtype, device)
    return open_weights(files, model_config, dtype, device)
