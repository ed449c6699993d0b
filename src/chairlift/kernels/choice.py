"""The choice of kernel set and number formats of an engine, without torch, so that planning does not need it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.kernels.kernel_memory import KernelMemory
from chairlift.kernels.kernel_set import KernelsUnavailableError, find_kernel_set

logger = logging.getLogger("chairlift")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel set and number formats that the options of an engine resolve to.

    Attributes:
        kernels: "native", "triton" or "torch".
        dtype: the type of activations, and of weights except with native kernels.
        kv_cache_dtype: the type of K and V in memory.
        quantization: the format of all matrices; None keeps the formats of the file.
    """

    kernels: str
    dtype: str
    kv_cache_dtype: str
    quantization: str | None

    @property
    def description(self) -> str:
        """The kernel set, with the instruction set of native kernels: "native (avx512-vnni)"."""
        return find_kernel_set(self.kernels).description

    def memory(self, device: str) -> KernelMemory:
        """The memory of the kernel set on "cpu" or "cuda"."""
        return find_kernel_set(self.kernels).memory(self.dtype, device, self.quantization)


def choose_kernels(config: EngineConfig, file_dtype: str, *, is_pooling: bool = False) -> KernelChoice:
    """Resolve the value "auto" of `kernels`, `dtype` and `kv_cache_dtype`.

    Args:
        file_dtype: the type of the model's tensors, `ModelConfig.dtype`.
        is_pooling: whether the model computes vectors or scores. K and V of a text are then read in a few steps only,
            so their size matters less than the exactness of the result.

    Raises:
        ConfigError: native or triton kernels cannot be loaded, and `quantization` or `kv_cache_dtype` needs them; or
            triton kernels are chosen for the CPU, except for the interpreter of Triton.
    """
    kernels = _kernel_set(config)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if config.device == "cpu" else file_dtype
    kv_cache_dtype = config.kv_cache_dtype
    if kv_cache_dtype == "auto":
        kv_cache_dtype = "bfloat16" if kernels == "native" and not is_pooling else dtype
    return KernelChoice(kernels, dtype, kv_cache_dtype, config.quantization)


def _kernel_set(config: EngineConfig) -> str:
    if config.kernels == "triton" and config.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"kernels=triton needs device=cuda, got {config.device}: choose kernels=native or kernels=torch"
        )
    if config.kernels != "auto":
        return config.kernels
    if config.may_use_triton:
        return _available("triton", config, "gather K and V for each layer")
    if config.native_conflict is not None:
        return "torch"
    return _available("native", config, "are several times slower and keep weights in float32")


def _available(name: str, config: EngineConfig, drawback: str) -> str:
    """The kernel set with a name, or torch with a warning of its drawback if this machine cannot load the set."""
    try:
        find_kernel_set(name).check_available()
    except KernelsUnavailableError as error:
        if config.quantization is not None or config.kv_cache_dtype == "int8":
            raise
        _warn_once(f"{error}. The torch kernels are used, which {drawback}")
        return "torch"
    return name


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
