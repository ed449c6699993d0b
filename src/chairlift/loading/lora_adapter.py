"""Reader of LoRA adapters in the folders of the PEFT library, which checks them against the model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from chairlift.errors import ModelLoadError
from chairlift.kernels.lora import LoraMatrices
from chairlift.models.declaration import ModelConfig
from chairlift.models.registry import get_architecture

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
ENDINGS: Final = {".lora_A.weight": "A", ".lora_B.weight": "B"}

_FIELDS: Final = """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha
    lora_dropout lora_ga_config megatron_core peft_type peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules task_type use_rslora
"""
NEUTRAL_FIELDS: Final = frozenset(_FIELDS.split())
"""The fields of a configuration that are read, that concern training only, or that were applied to the tensors of the
file already. Others must be empty."""

BASE_CHANGING_INITS: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` under which training replaces the weights of the base model."""

Matcher = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class _Target:
    """A matrix of the model that adapters can have: its declared name and its shape."""

    name: str
    out_features: int
    in_features: int


def read_lora_adapter(path: str, config: ModelConfig, max_rank: int) -> LoraMatrices:
    """Read an adapter from a folder with adapter_config.json and adapter_model.safetensors.

    Args:
        config: the declaration of the model that the adapter is for.
        max_rank: the largest rank that is accepted.

    Raises:
        ModelLoadError: the adapter is not supported, does not fit the model, or cannot be read.
    """
    folder = Path(path).expanduser()
    fields = _read_config(folder)
    rank_of, alpha_of = (
        _pattern(fields, key, default) for key, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    targets, others = _targets(config), _other_modules(config)
    base = fields.get("base_model_name_or_path")
    matrices = {}
    for module, tensors in _read_pairs(folder):
        where = f"{folder / WEIGHTS_FILE}: {module}"
        if module not in targets:
            if module in others:
                raise ModelLoadError(
                    f"{where} is {others[module]}; adapters are supported in the projections of attention and of dense "
                    "feed-forward networks: train the adapter without this module"
                )
            raise ModelLoadError(
                f"{where} is no module of this model ({config.name}, {config.num_layers} layers): the adapter was "
                f"trained for another model (base_model_name_or_path={base!r})"
            )
        target = targets[module]
        rank = rank_of(module)
        a, b = tensors
        if rank > max_rank:
            raise ModelLoadError(
                f"{where} has rank {rank}, but max_lora_rank={max_rank}: increase --max-lora-rank to at least {rank}"
            )
        expected = [rank, target.in_features], [target.out_features, rank]
        if ([*a.shape], [*b.shape]) != expected:
            raise ModelLoadError(
                f"{where}: lora_A and lora_B have the shapes {[*a.shape]} and {[*b.shape]}, but rank {rank} and the "
                f"matrix of this model need {expected[0]} and {expected[1]}: the adapter was trained for another model "
                f"(base_model_name_or_path={base!r}), or its files do not belong together"
            )
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ModelLoadError(f"{where} contains values that are not finite: the file is damaged")
        scale = alpha_of(module) / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        matrices[target.name] = a.float(), (b.float() * scale).t().contiguous()
    if not matrices:
        raise ModelLoadError(f"{folder / WEIGHTS_FILE} contains no adapter")
    return matrices


def _read_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json, and reject what is not supported."""
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ModelLoadError(
            f"{path}: {error.strerror or error}; a LoRA adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        found = fields.get("peft_type") if isinstance(fields, dict) else None
        raise ModelLoadError(f"{path}: peft_type must be 'LORA', got {found!r:.100}")
    for name, value in fields.items():
        if name not in NEUTRAL_FIELDS and value:
            raise ModelLoadError(f"{path}: {name}={value!r:.100} is not supported: train the adapter without it")
    if fields.get("bias", "none") != "none":
        raise ModelLoadError(f"{path}: bias must be 'none', got {fields['bias']!r:.100}: train the adapter without it")
    init = str(fields.get("init_lora_weights", True))
    if init.startswith(BASE_CHANGING_INITS):
        raise ModelLoadError(
            f"{path}: init_lora_weights={init!r} changes the weights of the base model: convert the adapter with "
            "path_initial_model_for_weight_conversion of save_pretrained"
        )
    for name, kind in (("r", int), ("lora_alpha", (int, float))):
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise ModelLoadError(f"{path}: {name} must be a number above 0, got {value!r:.100}")
    return fields


def _pattern(fields: dict[str, Any], key: str, default: str) -> Matcher:
    """Return the value of a module: that of the first pattern that matches the end of its name, or the default."""
    patterns = fields.get(key) or {}

    def value_of(module: str) -> Any:
        found = (value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", module))
        return next(found, fields[default])

    return value_of


def _read_pairs(folder: Path) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the name of each module of the adapter with its matrices A and B."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = "adapter_model.bin can run code and is not read: save the adapter with safe_serialization=True"
        raise ModelLoadError(f"{path} does not exist; {hint if pickled else 'a LoRA adapter needs it'}")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        if ending is None or not name.startswith(PREFIX) or not tensor.is_floating_point():
            raise ModelLoadError(
                f"{path}: tensor {name} is not supported: train the adapter with matrices lora_A and lora_B only"
            )
        module = name.removeprefix(PREFIX).removesuffix(ending)
        pairs.setdefault(module, {})[ENDINGS[ending]] = tensor
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise ModelLoadError(f"{path}: {module} has lora_{next(iter(pair))} only: the file is incomplete")
        yield module, (pair["A"], pair["B"])


def _targets(config: ModelConfig) -> dict[str, _Target]:
    """The matrices that adapters can have, by each name that checkpoints of the model may use for the module."""
    architecture = get_architecture(config)
    return {
        stored.name.removesuffix(".weight"): _Target(name, out, matrix.in_features)
        for layer in config.layers
        for matrix in layer.adaptable
        for name, out in matrix.parts
        for stored in architecture.hf_names(f"{name}.weight")
    }


def _other_modules(config: ModelConfig) -> dict[str, str]:
    """The other matrices of the model, and what they are."""
    architecture = get_architecture(config)
    return {
        stored.name.removesuffix(".weight"): f"a matrix of the group {matrix.group!r}"
        for matrix in (*config.matrices, config.head)
        for weight in matrix.weight_names
        for stored in architecture.hf_names(weight)
    }
