"""How much memory a model's parameters really take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from chairlift.kernels.attention import KVCache
from chairlift.kernels.cpu.row_buffers import RowBuffers
from chairlift.kernels.cpu.tape import RecordedLayers


def parameter_bytes(model: object) -> int:
    """Bytes of all float tensors that an object of this package leads to, each storage once; K and V, and what a step
    works in, are left out.

    It asks the objects and not the architecture, so it counts what is there: copies that a kernel packed, and no table
    twice that two layers share. A matrix that oneDNN packed counts its values, without their padding; a native kernel
    says itself what it holds (`num_bytes`).
    """
    storages: dict[int, int] = {}
    said = 0
    for item in _objects(model):
        if isinstance(item, torch.Tensor):
            storages.update(_storage(item))
        else:
            said += _says(item, "num_bytes")
    return sum(storages.values()) + said


def native_matrix_bytes(model: object) -> int:
    """Bytes of the matrices that the native linear layers of a model read in every step."""
    return sum(_says(item, "matrix_bytes") for item in _objects(model))


def _objects(model: object) -> Iterator[Any]:
    """What the model leads to, each once."""
    seen: set[int] = set()
    to_visit = [model]
    while to_visit:
        item = to_visit.pop()
        if id(item) in seen or isinstance(item, KVCache | RowBuffers | RecordedLayers):
            continue
        seen.add(id(item))
        yield item
        if not isinstance(item, torch.Tensor):
            to_visit.extend(_parts(item))


def _says(item: Any, attribute: str) -> int:
    num_bytes = getattr(item, attribute, 0) if type(item).__module__.startswith("chairlift.kernels.cpu.") else 0
    assert isinstance(num_bytes, int)
    return num_bytes


def _storage(tensor: torch.Tensor) -> dict[int, int]:
    if not tensor.is_floating_point():
        return {}
    if tensor.layout != torch.strided:
        return {id(tensor): tensor.numel() * tensor.element_size()}
    storage = tensor.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple):
        yield from item
    elif isinstance(item, partial):
        yield from (item.args, item.keywords)
    elif type(item).__module__.startswith("chairlift."):
        yield from vars(item).values() if hasattr(item, "__dict__") else ()
        slots = (slot for kind in type(item).__mro__ for slot in getattr(kind, "__slots__", ()))
        yield from (getattr(item, slot) for slot in slots if hasattr(item, slot))
