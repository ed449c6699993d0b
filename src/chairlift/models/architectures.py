"""The table of architectures."""

from __future__ import annotations

from typing import Final

from chairlift.errors import ModelLoadError
from chairlift.models.architecture import Architecture
from chairlift.models.config import ModelConfig
from chairlift.models.llama import LLAMA
from chairlift.models.opt import OPT

ARCHITECTURES: Final[dict[str, Architecture]] = {architecture.name: architecture for architecture in (LLAMA, OPT)}
"""`ModelConfig.architecture` -> how its checkpoints are read."""


def architecture_of(config: ModelConfig) -> Architecture:
    """The architecture of a model; raises ModelLoadError if there is no such one."""
    found = ARCHITECTURES.get(config.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"architecture must be one of {known}, got {config.architecture!r} ({config.name})")
    return found
