"""Reader of LoRA adapters in the folders of the PEFT library, which checks them against the model."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from chairlift.errors import ModelLoadError
from chairlift.kernels.lora import LoraMatrices
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import StoredName
from chairlift.models.registry import get_architecture
from chairlift.system.input_files import MAX_OPTIONS_BYTES, read_bytes

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

DTYPES: Final = ("F32", "F16", "BF16")
"""The types of tensors that are read, as safetensors names them."""

MAX_SCALE: Final = 1e4
"""Scales of published adapters are below 100."""

MAX_PATTERN_CHARACTERS: Final = 1000
MAX_PATTERN_COST: Final = 2e6
"""Bounds the matching of patterns with modules to about a second. A pattern costs 1 for each module of the model, and
_COST_OF_REPETITION times as much with each repetition, because that many places in a name are tried."""

_COST_OF_COMPILING: Final = 1000
_COST_OF_REPETITION: Final = 40
_REPETITION: Final = re.compile(r"[*+{]")
_UNBOUNDED: Final = re.compile(r"\)[*+?{]|\(\?|\\[1-9]")
"""Repeated groups, lookaround and references to groups, whose cost grows with more than the length of a name."""

Rank = Annotated[int, msgspec.Meta(ge=1)]
Alpha = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Target:
    """A matrix of the model that adapters can have: its declared name and its shape.

    Attributes:
        place: its rows in the module of the file.
        head_dim: the number of rows of a head.
    """

    name: str
    out_features: int
    in_features: int
    place: StoredName
    head_dim: int


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that change results, with the values that are supported."""

    peft_type: Literal["LORA"]
    r: Rank
    lora_alpha: Alpha
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    use_rslora: bool | None = False
    bias: Literal["none"] = "none"
    init_lora_weights: Any = True
    base_model_name_or_path: Any = None


def read_lora_adapter(path: str, config: ModelConfig, max_rank: int) -> LoraMatrices:
    """Read an adapter from a folder with adapter_config.json and adapter_model.safetensors.

    The type and shape of a tensor are checked before it is read, so the sizes of the model limit the memory.

    Args:
        config: the declaration of the model that the adapter is for.
        max_rank: the largest rank that is accepted.

    Raises:
        ModelLoadError: the adapter is not supported, does not fit the model, or cannot be read.
    """
    try:
        folder = Path(path).expanduser()
    except RuntimeError as error:
        raise ModelLoadError(f"{path!r:.200} is not the path of a folder: {error}") from None
    adapter = _read_config(folder)
    with _open_weights(folder / WEIGHTS_FILE) as file:
        matrices = dict(_read_matrices(file, folder / WEIGHTS_FILE, adapter, config, max_rank))
    if not matrices:
        raise ModelLoadError(f"{folder / WEIGHTS_FILE} contains no adapter")
    return matrices


def _read_config(folder: Path) -> _AdapterConfig:
    """Read adapter_config.json, and reject what is not supported."""
    path = folder / CONFIG_FILE
    try:
        fields = msgspec.json.decode(read_bytes(path, MAX_OPTIONS_BYTES))
    except OSError as error:
        raise ModelLoadError(
            f"{path}: {error.strerror or error}; a LoRA adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    try:
        adapter = msgspec.convert(fields, _AdapterConfig)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path} is not supported: {error}") from None
    for name, value in fields.items():
        if name not in NEUTRAL_FIELDS and value:
            raise ModelLoadError(f"{path}: {name}={value!r:.100} is not supported: train the adapter without it")
    init = str(adapter.init_lora_weights)
    if init.startswith(BASE_CHANGING_INITS):
        raise ModelLoadError(
            f"{path}: init_lora_weights={init!r:.100} changes the weights of the base model: convert the adapter with "
            "path_initial_model_for_weight_conversion of save_pretrained"
        )
    return adapter


def _matcher(path: Path, values: Mapping[str, T] | None, default: T, num_modules: int) -> Callable[[str], T]:
    """Return a function that finds the first pattern that matches the end of a module's name, and returns its value, or
    else the default.

    Patterns are regular expressions of the file. Their cost is limited, because requests wait meanwhile.
    """
    patterns = []
    cost = 0.0
    for pattern, value in (values or {}).items():
        num_repetitions = min(len(_REPETITION.findall(pattern)), 9)
        cost += _COST_OF_COMPILING + num_modules * _COST_OF_REPETITION**num_repetitions
        if len(pattern) > MAX_PATTERN_CHARACTERS or _UNBOUNDED.search(pattern) or cost > MAX_PATTERN_COST:
            raise ModelLoadError(
                f"{path}: the patterns up to {pattern!r:.100} are too many or too complex: use the names of modules"
            )
        try:
            re.compile(pattern)
            patterns.append((re.compile(rf"(.*\.)?({pattern})$"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelLoadError(f"{path}: {pattern!r:.100} is not a regular expression: {error}") from None
    return lambda module: next((value for pattern, value in patterns if pattern.match(module)), default)


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    """Open the tensors of an adapter, of which only the names, types and shapes are read at first."""
    if not path.is_file():
        pickled = path.with_name("adapter_model.bin").is_file()
        hint = "adapter_model.bin can run code and is not read: save the adapter with safe_serialization=True"
        raise ModelLoadError(f"{path} is not a file; {hint if pickled else 'a LoRA adapter needs it'}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None


def _read_matrices(
    file: Any, path: Path, adapter: _AdapterConfig, config: ModelConfig, max_rank: int
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the declared name of each adapted matrix with its A and its scaled and transposed B."""
    targets, others = _targets(config), _other_modules(config)
    rank_of = _matcher(path, adapter.rank_pattern, adapter.r, len(targets))
    alpha_of = _matcher(path, adapter.alpha_pattern, adapter.lora_alpha, len(targets))
    origin = f"was trained for another model (base_model_name_or_path={adapter.base_model_name_or_path!r:.100})"
    for module, names in _module_pairs(file, path):
        where = f"{path}: {module}"
        if module not in targets and module in others:
            raise ModelLoadError(
                f"{where} is {others[module]}; adapters of this model are supported in {_names_in_layers(targets)}: "
                "train the adapter without this module"
            )
        if module not in targets:
            raise ModelLoadError(
                f"{where} is no module of this model ({config.name}, {config.num_layers} layers): the adapter {origin}"
            )
        target, rank, alpha = targets[module][0], rank_of(module), alpha_of(module)
        if rank > max_rank:
            raise ModelLoadError(
                f"{where} has rank {rank}, but max_lora_rank={max_rank}: increase --max-lora-rank to at least {rank}"
            )
        shapes = tuple(file.get_slice(name).get_shape() for name in names)
        expected = [rank, target.in_features], [target.out_features * target.place.row_step, rank]
        if shapes != expected:
            raise ModelLoadError(
                f"{where}: lora_A and lora_B have the shapes {shapes[0]} and {shapes[1]}, but rank {rank} and the "
                f"matrix of this model need {expected[0]} and {expected[1]}: the adapter {origin}, or its files do not "
                "belong together"
            )
        scale = alpha / (math.sqrt(rank) if adapter.use_rslora else rank)
        if scale > MAX_SCALE:
            raise ModelLoadError(
                f"{where}: lora_alpha={alpha:g} and rank {rank} scale by {scale:g}, above {MAX_SCALE:g}"
            )
        a, b = (file.get_tensor(name).float() for name in names)
        b = b * scale
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ModelLoadError(f"{where} contains values that are not finite: the file is damaged")
        for part in targets[module]:
            yield part.name, (a, part.place.select_rows(b, part.head_dim).t().contiguous())


def _module_pairs(file: Any, path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name of each module of the adapter with the names of its tensors A and B."""
    pairs: dict[str, dict[str, str]] = {}
    for name in file.keys():  # noqa: SIM118
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        dtype = file.get_slice(name).get_dtype()
        if ending is None or not name.startswith(PREFIX) or dtype not in DTYPES:
            raise ModelLoadError(
                f"{path}: tensor {name:.200} ({dtype}) is not supported: train the adapter with matrices lora_A and "
                f"lora_B only, in one of {', '.join(DTYPES)}"
            )
        pairs.setdefault(name.removeprefix(PREFIX).removesuffix(ending), {})[ENDINGS[ending]] = name
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise ModelLoadError(f"{path}: {module} has lora_{next(iter(pair))} only: the file is incomplete")
        yield module, (pair["A"], pair["B"])


def _targets(config: ModelConfig) -> dict[str, list[_Target]]:
    """The matrices that adapters can have, by each name that checkpoints of the model may use for the module. A module
    may hold several."""
    architecture, targets = get_architecture(config), dict[str, list[_Target]]()
    for layer in config.layers:
        head_dim = 0 if layer.attention is None else layer.attention.head_dim
        for matrix in layer.adaptable:
            for name, out in matrix.parts:
                for place in architecture.hf_names(f"{name}.weight"):
                    target = _Target(name, out, matrix.in_features, place, head_dim)
                    targets.setdefault(place.name.removesuffix(".weight"), []).append(target)
    return targets


def _names_in_layers(modules: Iterable[str]) -> str:
    """The names of modules without their layers, once each."""
    return ", ".join(sorted({re.sub(r"^.*?\.\d+\.", "", module) for module in modules}))


def _other_modules(config: ModelConfig) -> dict[str, str]:
    """The other matrices of the model, and what they are."""
    architecture = get_architecture(config)
    latents = (spec.latent for spec in config.attention_specs.values())
    divided = {f"{name}.weight" for latent in latents if latent for name in latent.stored}
    return {
        stored.name.removesuffix(".weight"): f"a matrix of the group {matrix.group!r}"
        + (", which latent attention computes in several parts" if weight in divided else "")
        for matrix in (*config.matrices, config.head)
        for weight in matrix.weight_names
        for stored in architecture.hf_names(weight)
    }
