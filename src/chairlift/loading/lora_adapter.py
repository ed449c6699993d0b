"""Reader of LoRA adapters in the folders of the PEFT library, which checks them against the model."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from chairlift.counts import counted
from chairlift.errors import ModelLoadError
from chairlift.kernels.lora import LoraMatrices
from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.matrix_spec import StoredRows
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import StoredName
from chairlift.models.reading.delta_sizes import ungrouped_rows
from chairlift.models.reading.wrappers import ENCODER_PREFIXES
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
logger = logging.getLogger("chairlift")


@dataclass(frozen=True, slots=True)
class _Target:
    """A matrix of the model that adapters can have: its declared name and its shape.

    Attributes:
        place: its rows in the module of the file.
        head_dim: the number of rows of a head.
        columns: the columns of the module in the order of the matrix; None for the same order.
    """

    name: str
    out_features: int
    in_features: int
    place: StoredName
    head_dim: int
    columns: Sequence[int] | None = None


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
    if config.name in get_architecture(config).gguf_scaled:
        raise ModelLoadError(
            f"{folder}: adapters of {config.name} are not supported with a GGUF file, whose matrices contain factors "
            "that the file does not name: use the folder of the model"
        )
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


def _matcher(path: Path, values: Mapping[str, T], num_modules: int) -> Callable[[str], dict[str, T]]:
    """Return a function that finds the patterns that match the end of a module's name, with their values.

    Patterns are regular expressions of the file. Their cost is limited, because requests wait meanwhile.
    """
    patterns = {}
    cost = 0.0
    for pattern in values:
        num_repetitions = min(len(_REPETITION.findall(pattern)), 9)
        cost += _COST_OF_COMPILING + num_modules * _COST_OF_REPETITION**num_repetitions
        if len(pattern) > MAX_PATTERN_CHARACTERS or _UNBOUNDED.search(pattern) or cost > MAX_PATTERN_COST:
            raise ModelLoadError(
                f"{path}: the patterns up to {pattern!r:.100} are too many or too complex: use the names of modules"
            )
        try:
            re.compile(pattern)
            patterns[pattern] = re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelLoadError(f"{path}: {pattern!r:.100} is not a regular expression: {error}") from None
    return lambda module: {pattern: values[pattern] for pattern, found in patterns.items() if found.match(module)}


class _Ranks:
    """The rank and alpha of modules by the patterns of a file, of which the first match counts.

    PEFT sorts the patterns when it saves, so that another one may match first than in training. Where the tensors have
    another rank, it counts, with the alpha of a pattern of this rank.

    Attributes:
        replaced: the modules whose tensors have another rank than the first pattern that matches.
    """

    def __init__(self, path: Path, adapter: _AdapterConfig, num_modules: int) -> None:
        self._adapter = adapter
        self._ranks = _matcher(path, adapter.rank_pattern or {}, num_modules)
        self._alphas = _matcher(path, adapter.alpha_pattern or {}, num_modules)
        self.replaced: list[str] = []

    def find(self, module: str, stored: int) -> tuple[int, float]:
        """The rank and alpha of a module whose tensors have the rank `stored`."""
        ranks, alphas = self._ranks(module), self._alphas(module)
        rank, same = next(iter(ranks.values()), self._adapter.r), list[float]()
        if ranks and stored and stored != rank:
            self.replaced.append(f"{module} (rank {stored} instead of {rank})")
            same = [alphas[pattern] for pattern, each in ranks.items() if each == stored and pattern in alphas]
            rank = stored
        return rank, next(iter((*same, *alphas.values())), self._adapter.lora_alpha)

    def log(self, path: Path) -> None:
        """Log a warning for the modules in `replaced`."""
        if self.replaced:
            logger.warning(
                f"{path.parent / CONFIG_FILE}: rank_pattern has other ranks than the tensors of "
                f"{counted(len(self.replaced), 'module')}, such as {self.replaced[0]}: the ranks of the tensors are "
                "used. PEFT sorts the patterns when it saves, so that another one matches first than in training"
            )


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
    targets = _targets(config)
    ranks = _Ranks(path, adapter, len(targets))
    origin = f"was trained for another model (base_model_name_or_path={adapter.base_model_name_or_path!r:.100})"
    pairs = dict(_module_pairs(file, path))
    if encoders := [module for module in pairs if f"{module}.".startswith(ENCODER_PREFIXES)]:
        logger.info(f"{path}: skipped {counted(len(encoders), 'module')} of encoders, such as {encoders[0]}")
    for module, names in pairs.items():
        where = f"{path}: {module}"
        if module in encoders:
            continue
        if module not in targets:
            raise ModelLoadError(f"{where} is {_why_not_adaptable(module, config, targets, origin)}")
        target, shapes = targets[module][0], tuple(file.get_slice(name).get_shape() for name in names)
        rank, alpha = ranks.find(module, next(iter(shapes[0]), 0))
        if rank > max_rank:
            raise ModelLoadError(
                f"{where} has rank {rank}, but max_lora_rank={max_rank}: increase --max-lora-rank to at least {rank}"
            )
        expected = [rank, target.in_features], [*target.place.file_shape((target.out_features, rank), 0)]
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
        a = a if target.columns is None else a[:, list(target.columns)]
        for part in targets[module]:
            yield part.name, (a, part.place.select_rows(b, part.head_dim).t().contiguous())
    ranks.log(path)


def _why_not_adaptable(module: str, config: ModelConfig, targets: Mapping[str, object], origin: str) -> str:
    """Return what a module is that no adapter can have, and what to do."""
    whole = module.removesuffix(".base_layer") + "."
    for name, kind in _other_modules(config).items():
        if f"{name}.".startswith(whole):
            return (
                f"{kind}; adapters of this model are supported in {_names_in_layers(targets)}: train the adapter "
                "without this module"
            )
    return f"no module of this model ({config.name}, {config.num_layers} layers): the adapter {origin}"


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
        rows, columns = _orders_of_heads(layer)
        for matrix in layer.adaptable:
            for name, out in matrix.parts:
                for place in architecture.hf_names(f"{name}.weight"):
                    place = place._replace(part=rows.get(name))
                    target = _Target(name, out, matrix.in_features, place, head_dim, columns.get(name))
                    targets.setdefault(place.name.removesuffix(".weight"), []).append(target)
    return targets


def _orders_of_heads(layer: LayerSpec) -> tuple[Mapping[str, StoredRows], Mapping[str, Sequence[int]]]:
    """The rows and columns of modules of the gated delta rule, in the order that the model has, by the names of its
    matrices. Value heads are grouped by key head in modules, and every n-th one is of a key head in GGUF files."""
    recurrence = layer.recurrence
    if recurrence is None or (rule := recurrence.gated_delta) is None:
        return {}, {}
    if not rule.has_tiled_keys:
        return rule.stored, {}
    shared, rows, ((output, _),) = (
        rule.num_heads // rule.num_key_heads,
        dict[str, StoredRows](),
        recurrence.output.parts,
    )
    for (name, out), first in zip(recurrence.input.parts, (2 * rule.num_keys, 0, 0, 0), strict=True):
        heads = ungrouped_rows(rule.num_key_heads, [(out - first) // rule.num_heads] * shared).rows
        rows[name] = StoredRows(out, [*range(first), *(first + row for row in heads)])
    return rows, {output: ungrouped_rows(rule.num_key_heads, [rule.value_dim] * shared).rows}


def _names_in_layers(modules: Iterable[str]) -> str:
    """The names of modules without their layers, once each."""
    return ", ".join(sorted({re.sub(r"^.*?\.\d+\.", "", module) for module in modules}))


def _other_modules(config: ModelConfig) -> dict[str, str]:
    """The other modules of the model, and what they are."""
    architecture = get_architecture(config)
    latents = (spec.latent for spec in config.attention_specs.values())
    divided = {name for latent in latents if latent for name in latent.stored}
    kinds = {
        name: f"a matrix of the group {matrix.group!r}"
        + (", which latent attention computes in several parts" if name in divided else "")
        for matrix in (*config.matrices, config.head)
        for name, _ in matrix.parts
    }
    for recurrence in (layer.recurrence for layer in config.layers if layer.recurrence is not None):
        names = (recurrence.convolution.name, *recurrence.convolution.parts)
        kinds |= dict.fromkeys(names, "a convolution")
    return {
        stored.name.removesuffix(".weight"): kind
        for name, kind in kinds.items()
        for stored in architecture.hf_names(f"{name}.weight")
    }
