"""FileWeights: the common part of weights from files, which checks shapes and records the tensors that are read."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, Self

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PackedRows, packed_tensor
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import NUMBER, StoredName

MAX_NAMES_SHOWN: Final = 5
"""Maximum number of tensor names in a message."""

FLOAT_DTYPES: Final = {"f16": torch.float16, "bf16": torch.bfloat16}


class FileWeights(ABC):
    """A `Weights` over the named tensors of a file or folder.

    Args:
        path: the file or folder.
        config: the declaration of the model.
        dtype, device: the type and device of the tensors that `tensor` returns.
        unread: the prefixes of the names of tensors that are not read.
        unread_ends: the ends of the names of further tensors that are not read, because the weights do not need them.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        unread: tuple[str, ...],
        unread_ends: re.Pattern[str] | None,
    ) -> None:
        self._unread = unread
        self._unread_ends = unread_ends
        self.path = path
        self.config = config
        self.dtype = dtype
        self.device = device
        self._tensors_read: set[str] = set()
        routers = (layer.mixture.router for layer in config.layers if layer.mixture is not None)
        self._num_experts = max((router.num_experts for router in routers if router is not None), default=0)
        self._head_dim = max((spec.head_dim for spec in config.attention_specs.values()), default=0)
        latents = (spec.latent for spec in config.attention_specs.values())
        rules = (layer.recurrence.gated_delta for layer in config.layers if layer.recurrence is not None)
        stored = (*(latent.stored for latent in latents if latent), *(rule.stored for rule in rules if rule))
        self._parts = {name: part for parts in stored for name, part in parts.items()}
        recurrences = (layer.recurrence for layer in config.layers if layer.recurrence is not None)
        self._joined = {f"{each.convolution.name}.weight": each.convolution.parts for each in recurrences}

    @abstractmethod
    def _places(self, name: str) -> list[StoredName]:
        """Return the places that files may use for a parameter, the usual one first."""

    @abstractmethod
    def _names(self) -> Collection[str]:
        """Return the names of all tensors in the file."""

    @abstractmethod
    def _shape(self, file_name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the file."""

    @abstractmethod
    def _read(self, stored: StoredName) -> torch.Tensor:
        """Return the parameter, on the CPU or on the device, in any type."""

    @abstractmethod
    def _read_packed(self, stored: StoredName) -> PackedRows:
        """Return the matrix on the CPU with its rows in the order of the file."""

    @abstractmethod
    def _file_names(self) -> Iterable[str]:
        """Return the names of the tensors in the file, without those that are computed instead of read."""

    @abstractmethod
    def _check_format(self, file_name: str) -> None:
        """Raise ModelLoadError if values of the tensor's type cannot be read."""

    def checked(self) -> Self:
        """Return these weights after a check of the types of all tensors, without reading their values.

        Raises:
            ModelLoadError: a type is not supported.
        """
        for file_name in self._file_names():
            if not self._has_unread_end(file_name):
                self._check_format(file_name)
        return self

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if parts := self._joined.get(name):
            return self._join(parts, shape)
        stored = self._find(name, shape)
        tensor = self._read(stored)
        if stored.part is not None and stored.part.is_transposed:
            tensor = tensor.t()
        return tensor.reshape(shape).to(device=self.device, dtype=self.dtype).contiguous()

    def _join(self, parts: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor whose rows are those of several tensors, in any division: transformers 5.24 saves the
        convolution of q, k and v in three equal parts, also where v is wider."""
        places = [self._place(f"{name}.weight") for name in parts]
        counts = [math.prod(self._shape(place.name)) // math.prod(shape[1:]) for place in places]
        if sum(counts) != shape[0]:
            names = ", ".join(place.name for place in places)
            raise ModelLoadError(
                f"{self.path}: the tensors {names} have {sum(counts)} rows together, but the configuration requires "
                f"{shape[0]}; use the configuration that belongs to the weights"
            )
        named = zip(parts, counts, strict=True)
        return torch.cat([self.tensor(f"{name}.weight", (count, *shape[1:])) for name, count in named])

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        stored = self._find(name, shape)
        return oriented(self._read_packed(stored), stored)

    def _with_parts(self, name: str, places: list[StoredName]) -> list[StoredName]:
        """Return the places of a parameter, with its rows if it is a part of a larger matrix or has another order.

        The declared name comes last, because no file has it for a part.
        """
        part = self._parts.get(name.removesuffix(".weight"))
        if part is None:
            return places
        found = [place._replace(expert=None, part=part) for place in places]
        own = NUMBER.split(name, maxsplit=1)[-1]
        return sorted(found, key=lambda place: place.name.endswith(own))

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredName:
        """Return the place of the parameter in the file, check its shape, and record that it is read."""
        return self._check_shape(self._place(name), shape)

    def _place(self, name: str) -> StoredName:
        places, names = self._places(name), self._names()
        stored = next((place for place in places if place.name in names), None)
        if stored is None:
            raise self._missing(places[0].name if places else name)
        return stored

    def _missing(self, file_name: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: tensor {file_name} is missing; the file is incomplete or does not match its configuration: "
            "download it again"
        )

    def _check_shape(self, stored: StoredName, shape: tuple[int, ...]) -> StoredName:
        """Check the shape of the tensor of a parameter, record that it is read, and return its place.

        Dimensions of size 1 do not count, because converters of convolutions and vectors leave them out.
        """
        required = stored.file_shape(shape, self._num_experts)
        found = self._shape(stored.name)
        if stored.expert is not None and found == (required[0], *required[:0:-1]) != required:
            stored, required = stored._replace(is_transposed=not stored.is_transposed), found
        if stored.part is not None:
            found = (math.prod(found[:-1]), found[-1])
        if [size for size in found if size != 1] != [size for size in required if size != 1]:
            raise ModelLoadError(
                f"{self.path}: tensor {stored.name} has the shape {found}, but the configuration requires {required}; "
                "use the configuration that belongs to the weights"
            )
        self._tensors_read.add(stored.name)
        return stored

    def notes(self) -> list[str]:
        """Return lines to log after a complete load, about the tensors that are not read."""
        skipped = Counter(prefix for name in self._names() for prefix in self._unread if name.startswith(prefix))
        ends = Counter(name.rpartition(".")[2] for name in self._names() if self._has_unread_end(name))
        return [
            *(
                f"skipped {count} tensors {prefix}*, which the text model does not use"
                for prefix, count in skipped.items()
            ),
            *(
                f"skipped {count} tensors *.{end}: only weights are quantized as in the file"
                for end, count in ends.items()
            ),
        ]

    def _has_unread_end(self, name: str) -> bool:
        return self._unread_ends is not None and self._unread_ends.search(name) is not None

    def check_all_read(self) -> None:
        """Raise ModelLoadError if a tensor that the model needs was not read."""
        if names := self.unused():
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
            raise ModelLoadError(
                f"{self.path}: {len(names)} tensors are not declared by the {self.config.architecture} architecture "
                f"({self.config.name}): {shown}. Ignoring them would change the results: use a checkpoint without them"
            )

    def unused(self) -> list[str]:
        """Return the file's names of the tensors that the model needs and that were not read. After a complete load
        there are none."""
        places = (place for module in self.config.unneeded_modules for place in self._places(f"{module}.weight"))
        unneeded = {place.name.removesuffix(".weight") for place in places}
        remaining = (name for name in set(self._file_names()) - self._tensors_read if not self._has_unread_end(name))
        return sorted(name for name in remaining if name.rpartition(".")[0] not in unneeded)


def oriented(packed: PackedRows, stored: StoredName) -> PackedRows:
    """Return the matrix whose rows or columns are the given rows. Transposed blocks become floats."""
    if stored.part is None or not stored.part.is_transposed:
        return packed
    values = torch.from_numpy(packed.to_floats(packed.rows)).t()
    return packed_tensor(values.to(FLOAT_DTYPES.get(packed.format, torch.float32)))
