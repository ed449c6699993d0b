"""Measurement of the memory that the parameters of a loaded model occupy, with which its planned memory is compared."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from chairlift.kernels.attention import KVCache
from chairlift.kernels.cpu.recurrence import NativeStates
from chairlift.kernels.cpu.row_buffers import RowBuffers
from chairlift.kernels.cpu.tape import RecordedLayers
from chairlift.kernels.recurrence import RecurrentState
from chairlift.kernels.torch_plan import AttentionPlanner

STEP_MEMORY = (KVCache, RecurrentState, RowBuffers, AttentionPlanner, RecordedLayers, NativeStates)
"""The classes that hold memory of steps, and no weights."""


def parameter_bytes(model: object) -> int:
    """Return the bytes of all float tensors that are reachable from an object of this package, each storage once.

    The objects are traversed, so copies that a kernel packed are counted, and a table that two layers share is counted
    once. A matrix that oneDNN packed counts its values without padding. Kernels report the
    memory of copies outside tensors as `num_bytes`. KV memory, recurrent states and the buffers of a step are left out.
    """
    storages: dict[int, int] = {}
    native_bytes = 0
    for item in _objects(model):
        if isinstance(item, torch.Tensor):
            storages.update(_storage(item))
        else:
            native_bytes += _reported_bytes(item)
    return sum(storages.values()) + native_bytes


def _objects(model: object) -> Iterator[Any]:
    """Yield every object that is reachable from the model, each once."""
    seen: set[int] = set()
    to_visit = [model]
    while to_visit:
        item = to_visit.pop()
        if id(item) in seen or isinstance(item, STEP_MEMORY):
            continue
        seen.add(id(item))
        yield item
        if not isinstance(item, torch.Tensor):
            to_visit.extend(_parts(item))


def _reported_bytes(item: Any) -> int:
    num_bytes = getattr(item, "num_bytes", 0) if type(item).__module__.startswith("chairlift.kernels.") else 0
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
    elif type(item).__module__.startswith(("chairlift.", "support.reference_")):
        yield from vars(item).values() if hasattr(item, "__dict__") else ()
        slots = (slot for kind in type(item).__mro__ for slot in getattr(kind, "__slots__", ()))
        yield from (getattr(item, slot) for slot in slots if hasattr(item, slot))
