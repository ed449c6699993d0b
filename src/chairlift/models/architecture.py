"""Architecture: how the checkpoints of one architecture are read into a declaration."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chairlift.models.config import ModelConfig
from chairlift.models.config_fields import Fields

LAYER_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says before its tensors.

    Attributes:
        name: `general.architecture`; fields, general, tokens: the metadata below that name, `general.` and
            `tokenizer.ggml.`.
        rope_freqs: the tensor `rope_freqs.weight`, if there is one.
    """

    name: str
    fields: Fields
    general: Fields
    tokens: Fields
    tensor_names: Collection[str]
    rope_freqs: Sequence[float] | None


HFReader = Callable[[Fields], ModelConfig]
"""Reads every property of a `config.json` that the declaration covers; what it leaves is an error."""

GGUFReader = Callable[[GGUFHeader], ModelConfig]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture and the files that it is read from.

    Attributes:
        hf_readers: name in `architectures` of a `config.json` -> reader.
        gguf_readers: `general.architecture` -> reader.
        gguf_names: declared name of a parameter, its layer's number as "{}" -> GGUF's.
        gguf_interleaved: those of `gguf_readers` whose files hold the rows of each query and key head with the two
            dimensions of a rotated pair next to each other.
        other_prefixes: (declared beginning of a name, what some checkpoints have in its place).
    """

    name: str
    hf_readers: Mapping[str, HFReader] = field(default_factory=dict)
    gguf_readers: Mapping[str, GGUFReader] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: frozenset[str] = frozenset()
    other_prefixes: tuple[tuple[str, str], ...] = ()

    def gguf_name(self, name: str) -> str | None:
        """What GGUF files call a parameter ("model.norm.weight" -> "output_norm.weight"); None: they do not have it."""
        module, _, kind = name.rpartition(".")
        number = LAYER_NUMBER.search(module)
        if number is None:
            found = self.gguf_names.get(module)
        else:
            found = self.gguf_names.get(f"{module[: number.start()]}{{}}{module[number.end() :]}")
            found = None if found is None else found.format(number[0])
        return None if found is None else f"{found}.{kind}"

    def hf_names(self, name: str) -> list[str]:
        """What safetensors files may call a parameter, the declared name first."""
        others = (other + name.removeprefix(prefix) for prefix, other in self.other_prefixes if name.startswith(prefix))
        return [name, *others]
