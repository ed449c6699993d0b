"""GGUFFile: the header, the metadata and the tensors' positions of a GGUF file (specification, versions 2 and 3).

    magic, version, counts | key: value ... | name, dimensions, type, offset ... | padding | tensor data

`gguf.GGUFReader` reads the same, but takes seconds for the strings of a vocabulary and raises an IndexError for a
damaged file. The package `gguf` defines the types and dequantizes them.

A split model (llama.cpp, gguf-split) is several such files, whose metadata is in the first one.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.system.input_files import open_regular_file

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4
MAX_ARRAY_LENGTH: Final = 1 << 23  # A vocabulary has about 2^18 entries, each with up to 40 bytes of overhead.
DEFAULT_ALIGNMENT: Final = 32
ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""The tensors that are part of the configuration."""
UNSCALED: Final = "f32"
"""The format of the values of tensors whose type has no room for their factor."""
BOOL, STRING, ARRAY = 7, 8, 9
LENGTH: Final = struct.Struct("<Q")
SPLIT_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part of a split model: the name of the model, the number of the part from 1 on, the number of parts."""
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The position of a tensor in a GGUF file.

    Attributes:
        shape: the dimensions, outermost first.
        offset: the number of bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class _Cursor:
    """Reads consecutive little-endian values, and raises ModelLoadError at the end of the file."""

    def __init__(self, buffer: mmap.mmap, source: Path) -> None:
        self._buffer = buffer
        self._source = source
        self.position = 0

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._source}: {problem}")

    def take(self, size: int, what: str) -> int:
        """Advance by `size` bytes and return the position of the first one."""
        start = self.position
        if size > len(self._buffer) - start:
            raise self.error(
                f"truncated: {what} at byte {start} needs {size} bytes, but the file has only {len(self._buffer)}; "
                "download it again"
            )
        self.position = start + size
        return start

    def unpack(self, codes: str, what: str, count: int = 1) -> tuple[Any, ...]:
        """Read values with the given `struct` codes; `count` repeats a single code."""
        start = self.take(count * struct.calcsize("<" + codes), what)
        return struct.unpack_from(f"<{count if count != 1 else ''}{codes}", self._buffer, start)

    def strings(self, what: str, count: int = 1) -> list[str]:
        """Read strings, without a call for each, because a vocabulary and its merges have hundreds of thousands."""
        buffer, size, end, strings = self._buffer, len(self._buffer), self.position, []
        for _ in range(count):
            self.position, start = end, end + LENGTH.size
            if start > size or (end := start + LENGTH.unpack_from(buffer, end)[0]) > size:
                # Raises the error of the length or, if the length is complete, of the string.
                self.take(end - self.take(LENGTH.size, what) - LENGTH.size, what)
            try:
                strings.append(buffer[start:end].decode())
            except UnicodeDecodeError:
                raise self.error(f"damaged: {what} at byte {start} is not UTF-8") from None
        self.position = end
        return strings

    def value(self, kind: int, what: str) -> Any:
        if kind != ARRAY:
            return self._values(kind, what, 1)[0]
        kind, count = self.unpack("IQ", what)
        if kind == ARRAY:
            raise self.error(f"{what} at byte {self.position} is an array of arrays, which is not supported")
        if count > MAX_ARRAY_LENGTH:
            raise self.error(f"damaged: {what} has {count} entries; the limit is {MAX_ARRAY_LENGTH}")
        return self._values(kind, what, count)

    def _values(self, kind: int, what: str, count: int) -> list[Any]:
        if kind == STRING:
            return self.strings(what, count)
        if kind not in SCALARS:
            raise self.error(f"damaged: {what} at byte {self.position} has the unknown type {kind}")
        return list(self.unpack(SCALARS[kind], what, count))


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, of which `path` is one, or only `path` if it is a whole file."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [path]
    name, count = found[1], int(found[3])
    return [path.with_name(f"{name}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def existing_parts(path: Path) -> list[Path]:
    """Return the same as `part_paths`.

    Raises:
        ModelLoadError: a part of a split model is missing.
    """
    paths = part_paths(path)
    if len(paths) > 1 and (missing := [each.name for each in paths if not each.is_file()]):
        raise ModelLoadError(
            f"{path}: is one of {len(paths)} parts of a model, and {', '.join(missing[:3])} is missing in "
            f"{path.parent}; put all parts in one folder"
        )
    return paths


class GGUFFile:
    """An open GGUF file, or all parts of a split model, whose tensors are mapped into memory.

    The positions of the tensors are read when `tensors` is first used, so that neither `gguf` nor numpy is imported
    before.

    Args:
        path: the file, or any of the parts.

    Attributes:
        path: the file, or the first part.
        metadata: key -> int, float, bool, str or list of them.

    Raises:
        ModelLoadError: a file is missing, truncated, damaged (in the positions of tensors: when they are read), not a
            GGUF file, or of an unsupported version or byte order, or the files are not the parts of one model.
    """

    def __init__(self, path: Path) -> None:
        self._parts = [_GGUFPart(each) for each in existing_parts(path)]
        _check_parts(self._parts)
        self.path = self._parts[0].path
        self.metadata = self._parts[0].metadata

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """The position of each tensor in its part, by its name and in the order of the files."""
        tensors: dict[str, GGUFTensor] = {}
        for part in self._parts:
            for name in part.tensors.keys() & tensors.keys():
                raise ModelLoadError(f"{part.path}: damaged: tensor {name} is in an earlier part, too")
            tensors |= part.tensors
        return tensors

    def packed_format(self, name: str, scale_name: str) -> str:
        """Return the `PackedRows.format` of a tensor, with the factor in the tensor `scale_name` if there is one.

        A matrix with a factor becomes floats, except in NVFP4.
        """
        kind = self.tensors[name].type.name
        return UNSCALED if scale_name in self.tensors and kind != "NVFP4" else kind.lower()

    def metadata_digest(self) -> str:
        """SHA-256 of the metadata, in hexadecimal digits."""
        first = self._parts[0]
        return hashlib.sha256(first._buffer[: first._end_of_metadata]).hexdigest()

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a tensor, uint8 [rows, bytes per row], read-only.

        Raises:
            KeyError: there is no such tensor.
        """
        return next((part for part in self._parts if name in part.tensors), self._parts[0]).raw(name)


def _check_parts(parts: list[_GGUFPart]) -> None:
    """Raise if `split.no` and `split.count` do not agree with the names, or `split.tensors.count` with the tensors."""
    for index, part in enumerate(parts):
        number, count = part.split.integer("no", 0, low=0), part.split.integer("count", 0, low=0)
        if (number, count) != (index, len(parts)) and max(count, len(parts)) > 1:
            expected = "a whole file" if len(parts) == 1 else f"part {index + 1} of {len(parts)}"
            raise ModelLoadError(
                f"{part.path}: is {expected} by its name, but part {number + 1} of {max(count, 1)} by its header "
                "(split.no, split.count); restore the names of all parts (NAME-00001-of-00002.gguf)"
            )
    total = sum(part.num_tensors for part in parts)
    if len(parts) > 1 and (declared := parts[0].split.integer("tensors.count", low=0)) != total:
        raise ModelLoadError(
            f"{parts[0].path}: the model has {declared} tensors (split.tensors.count), but its {len(parts)} parts have "
            f"{total}; they are of different models: download all of them again"
        )


class _GGUFPart:
    """One file: a whole model or a part of one.

    Attributes:
        split: the metadata whose keys begin with `split.`.
        num_tensors: the number of tensors, by the header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = _map(path)
        cursor = _Cursor(self._buffer, path)
        self.num_tensors, num_keys = _read_counts(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.strings("a metadata key")[0]
            if key in self.metadata:
                raise cursor.error(f"damaged: the metadata key {key} occurs twice")
            self.metadata[key] = cursor.value(cursor.unpack("I", key)[0], key)
        self.split = ConfigFields(self.metadata, str(path), "split.")
        self._cursor, self._end_of_metadata = cursor, cursor.position

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """The position of each tensor by its name, in the order of the file."""
        cursor = self._cursor
        cursor.position = self._end_of_metadata
        entries = [_read_entry(cursor) for _ in range(self.num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.error(f"general.alignment must be a positive integer, got {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            tensor = _locate_tensor(cursor, name, shape, kind, data_start + offset)
            if name in tensors:
                raise cursor.error(f"damaged: tensor {name} occurs twice")
            cursor.position = tensor.offset
            cursor.take(tensor.num_bytes, f"tensor {name}")
            tensors[name] = tensor
        _reject_overlaps(cursor, tensors)
        return tensors

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        import numpy as np

        tensor = self.tensors[name]
        data = np.frombuffer(self._buffer, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)


def _reject_overlaps(cursor: _Cursor, tensors: dict[str, GGUFTensor]) -> None:
    for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if before.offset + before.num_bytes > after.offset:
            raise cursor.error(f"damaged: tensors {before.name} and {after.name} overlap at byte {after.offset}")


def _map(path: Path) -> mmap.mmap:
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelLoadError(f"{path}: the file is empty; download it again") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = b"".join(cursor.unpack("c", "the magic number", len(MAGIC)))
    if magic != MAGIC:
        raise cursor.error(f"not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
    (version,) = cursor.unpack("I", "the version")
    if version not in VERSIONS:
        raise cursor.error(
            f"GGUF version {version} is not supported; supported: little-endian 2 and 3; convert the model again"
        )
    num_tensors, num_keys = cursor.unpack("Q", "the counts", 2)
    return num_tensors, num_keys


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.strings("a tensor's name")[0]
    (num_dimensions,) = cursor.unpack("I", f"tensor {name}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"damaged: tensor {name} has {num_dimensions} dimensions")
    innermost_first = cursor.unpack("Q", f"tensor {name}", num_dimensions)
    kind, offset = cursor.unpack("IQ", f"tensor {name}")
    return name, innermost_first[::-1], kind, offset


def _locate_tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        quantization = GGMLQuantizationType(kind)
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    except (ValueError, KeyError):
        raise cursor.error(f"tensor {name} has the unknown type {kind}; upgrade the `gguf` package") from None
    if math.prod(shape) == 0 or shape[-1] % block_size:
        raise cursor.error(f"damaged: tensor {name} of type {quantization.name} has the shape {shape}")
    return GGUFTensor(name, shape, quantization, offset, math.prod(shape) // block_size * block_bytes)
