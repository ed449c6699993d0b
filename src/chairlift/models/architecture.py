"""Architecture: the readers and tensor names for the checkpoints of one model architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chairlift.models.config_fields import ConfigFields
from chairlift.models.declaration import ModelConfig

LAYER_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata and tensor names of a GGUF file.

    Attributes:
        name: the value of `general.architecture`.
        fields: the metadata whose keys begin with that name.
        tokens: the metadata whose keys begin with `tokenizer.ggml.`.
        tensor_names: the names of all tensors in the file.
        rope_factors: the factors of rotary embeddings in the file, by the name of the tensor (`rope_freqs.weight`).
    """

    name: str
    fields: ConfigFields
    tokens: ConfigFields
    tensor_names: Collection[str]
    rope_factors: Mapping[str, Sequence[float]]


HFReader = Callable[[ConfigFields], ModelConfig]
"""Reads every property of a `config.json` that the declaration covers. A property that it does not read is an error."""

GGUFReader = Callable[[GGUFHeader], ModelConfig]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model architecture: how its checkpoints are read, and how their files name the parameters.

    Attributes:
        hf_readers: the reader for each entry of `architectures` in a `config.json`.
        gguf_readers: the reader for each value of `general.architecture`.
        gguf_names: declared module name -> GGUF's module name, with "{}" in place of the layer number.
        gguf_interleaved: the keys of `gguf_readers` whose files store the two dimensions of a rotated pair in adjacent
            rows of each query and key head.
        other_prefixes: (declared prefix, prefix that some checkpoints have in its place).
        unread_prefixes: the prefixes of the parameters in safetensors files that have no part in a text model.
    """

    name: str
    hf_readers: Mapping[str, HFReader] = field(default_factory=dict)
    gguf_readers: Mapping[str, GGUFReader] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: frozenset[str] = frozenset()
    other_prefixes: tuple[tuple[str, str], ...] = ()
    unread_prefixes: tuple[str, ...] = ()

    def gguf_name(self, name: str) -> str | None:
        """Return a parameter's name in GGUF files ("model.norm.weight" -> "output_norm.weight"), or None."""
        module, _, kind = name.rpartition(".")
        number = LAYER_NUMBER.search(module)
        if number is None:
            found = self.gguf_names.get(module)
        else:
            found = self.gguf_names.get(f"{module[: number.start()]}{{}}{module[number.end() :]}")
            found = None if found is None else found.format(number[0])
        return None if found is None else f"{found}.{kind}"

    def hf_names(self, name: str) -> list[str]:
        """Return the names that safetensors files may use for a parameter, the declared name first."""
        others = (other + name.removeprefix(prefix) for prefix, other in self.other_prefixes if name.startswith(prefix))
        return [name, *others]
