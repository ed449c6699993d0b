"""Architecture: the readers and tensor names for the checkpoints of one model architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

from chairlift.models.declaration.matrix_spec import StoredRows
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES, GGUFHeader
from chairlift.models.reading.llama_sizes import ExpertNames
from chairlift.models.reading.wrappers import TEXT_PREFIXES

Rows = TypeVar("Rows", bound=Any)

NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
"""The numbers of layer and expert in the name of a parameter."""

BARE_PREFIX: Final = "model."
"""The beginning of names that a model without LM head (AutoModel) does not have."""


class StoredName(NamedTuple):
    """The place of a parameter in a file.

    Attributes:
        name: the name of the tensor.
        expert: the index of the parameter in a tensor that holds the parameters of all experts, or None.
        is_transposed: whether the tensor holds matrices [in, out].
        first_row, row_step: the first row of the parameter, and the distance between its rows.
        block: what these are numbers of: rows, heads of consecutive rows, or equal parts of the tensor; or "pair" for
            all rows, where the two dimensions of a rotated pair of a head are adjacent, and "half_pair" where only the
            first half of a head is rotated.
        part: the rows of the parameter in the tensor, which may hold several parameters; None without such a list.
    """

    name: str
    expert: int | None = None
    is_transposed: bool = False
    first_row: int = 0
    row_step: int = 1
    block: Literal["row", "head", "part", "pair", "half_pair"] = "row"
    part: StoredRows | None = None

    def file_shape(self, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Return the shape of the tensor of a parameter with the given shape."""
        if self.part is not None:
            return self.part.num_rows, shape[0 if self.part.is_transposed else 1]
        shape = (shape[0] * self.row_step, *shape[1:])
        shape = shape[::-1] if self.is_transposed else shape
        return shape if self.expert is None else (num_experts, *shape)

    def select_rows(self, rows: Rows, head_dim: int) -> Rows:
        """Return the rows of the parameter, of a tensor or an array [rows, ...]."""
        row_shape = tuple(rows.shape[1:])
        selected: Rows
        if self.part is not None:
            kept = self.part.rows
            selected = rows[slice(kept.start, kept.stop) if isinstance(kept, range) else list(kept)]
            return selected
        if self.block in ("pair", "half_pair"):
            rotated = head_dim if self.block == "pair" else head_dim // 2
            order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]
            selected = rows.reshape((-1, head_dim, *row_shape))[:, order].reshape((-1, *row_shape))
            return selected
        if self.row_step == 1:
            return rows
        size = {"row": 1, "head": head_dim, "part": len(rows) // self.row_step}[self.block]
        parts = rows.reshape((-1, self.row_step, size, *row_shape))
        selected = parts[:, self.first_row].reshape((-1, *row_shape))
        return selected


PAIRED_QUERIES_AND_KEYS: Final = {
    name: StoredName(name, block="pair")
    for name in ("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj")
}
"""The `stacked_names` of an architecture whose files have the two dimensions of a rotated pair in adjacent rows."""


def renamed_in_layers(names: Mapping[str, str]) -> dict[str, str | StoredName]:
    """Return `stacked_names` for files with other names in each layer: declared name -> name in the file."""
    return {f"model.layers.{{}}.{name}": f"model.layers.{{}}.{other}" for name, other in names.items()}


def stacked_experts(names: ExpertNames | None = None, layer: str = "model.layers.{}") -> dict[str, str | StoredName]:
    """Return the `stacked_names` of the experts of a layer in files that have one tensor for each projection of all
    experts, as transformers has since version 5, and gate and up in one."""
    names, prefix = names or ExpertNames(), f"{layer}.mlp.experts"
    gate, up = names.up
    place = StoredName(f"{prefix}.gate_up_proj", row_step=2, block="part")
    return {
        f"{layer}.{gate}.weight": place,
        f"{layer}.{up}.weight": place._replace(first_row=1),
        f"{layer}.{names.down}.weight": StoredName(f"{prefix}.down_proj"),
    }


HFReader = Callable[[ConfigFields], ModelConfig]
"""Reads every property of a `config.json` that the declaration covers. A property that it does not read is an error."""

GGUFReader = Callable[[GGUFHeader], ModelConfig]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model architecture: how its checkpoints are read, and how their files name the parameters.

    Attributes:
        hf_readers: the reader for each entry of `architectures` in a `config.json`.
        gguf_readers: the reader for each value of `general.architecture`.
        gguf_names: declared module name -> GGUF's module name, with "{}" in place of the numbers of layer and expert.
            If only the declared name has an expert, the tensor holds all experts. A parameter whose name does not end
            like its GGUF name has a separate entry. Or the place of a parameter that is a part of a tensor.
        gguf_interleaved: the keys of `gguf_readers` whose files store the two dimensions of a rotated pair in adjacent
            rows of each query and key head.
        gguf_scaled: the keys of `gguf_readers` whose files hold matrices multiplied by factors that they do not name.
        other_prefixes: (declared prefix, prefix that some checkpoints have in its place), beside those of wrappers.
        stacked_names: as gguf_names, for parameters with other names in safetensors files, such as experts
            that are in one tensor; or the place of a parameter that is a part of a tensor.
        unread_prefixes: the prefixes of the parameters in safetensors files that have no part in a text model.
    """

    name: str
    hf_readers: Mapping[str, HFReader] = field(default_factory=dict)
    gguf_readers: Mapping[str, GGUFReader] = field(default_factory=dict)
    gguf_names: Mapping[str, str | StoredName] = field(default_factory=lambda: GGUF_NAMES)
    gguf_interleaved: frozenset[str] = frozenset()
    gguf_scaled: frozenset[str] = frozenset()
    other_prefixes: tuple[tuple[str, str], ...] = ()
    stacked_names: Mapping[str, str | StoredName] = field(default_factory=dict)
    unread_prefixes: tuple[str, ...] = ()

    def gguf_name(self, name: str) -> StoredName | None:
        """Return a parameter's place in GGUF files ("model.norm.weight" -> "output_norm.weight"), or None."""
        return _stored_name(self.gguf_names, name)

    def gguf_scale(self, file_name: str) -> str:
        """Return the name of the tensor with the factor of a matrix, which llama.cpp's converter writes for NVFP4.

        The name is empty if such a tensor is a parameter of the architecture.
        """
        scale = f"{file_name.removesuffix('.weight')}.scale"
        return "" if NUMBER.sub("{}", scale) in self.gguf_names.values() else scale

    def hf_names(self, name: str) -> list[StoredName]:
        """Return the places that safetensors files may use for a parameter, the declared name first."""
        stacked = _stored_name(self.stacked_names, name)
        places = [StoredName(name), stacked] if stacked is None or stacked.name != name else [stacked]
        return [
            each._replace(name=found)
            for each in places
            if each is not None
            for found in self._with_other_prefixes(each.name)
        ]

    def _with_other_prefixes(self, name: str) -> list[str]:
        prefixes = *self.other_prefixes, *TEXT_PREFIXES
        others = (other + name.removeprefix(prefix) for prefix, other in prefixes if name.startswith(prefix))
        return list(dict.fromkeys((name, *others, name.removeprefix(BARE_PREFIX))))


def _stored_name(names: Mapping[str, str | StoredName], name: str) -> StoredName | None:
    module, _, kind = name.rpartition(".")
    found = _place(names.get(NUMBER.sub("{}", name)))
    if found is None and (found := _place(names.get(NUMBER.sub("{}", module)))) is not None:
        found = found._replace(name=f"{found.name}.{kind}")
    if found is None:
        return None
    numbers = NUMBER.findall(name)
    expert = int(numbers[-1]) if found.name.count("{}") < len(numbers) else None
    return found._replace(name=found.name.format(*numbers), expert=expert)


def _place(found: str | StoredName | None) -> StoredName | None:
    return StoredName(found) if isinstance(found, str) else found
