"""RecordedCapture: what a CUDA graph does, on the CPU: it repeats recorded operations on the memory of their tensors.

Numbers are frozen when they are recorded, tensors are not. What waits for the device, or copies from the host, is an
error, as in a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from chairlift.kernels.triton.launch import Launch
from chairlift.worker.decode_graphs import CapturedStep

WAITS: Final = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select"}
"""Operations whose result is a number on the host, or has a size that only the device knows. Some others, such as
`where` with one argument, are found by their arguments."""

HOST_FUNCTIONS: Final = ((torch.Tensor, "tolist"), (torch.Tensor, "numpy"), (torch, "tensor"), (torch, "from_numpy"))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of torch and the launches of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Callable[[], None]] = []
        self._is_launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in WAITS or _has_open_size(name, args, kwargs):
            raise RuntimeError(f"{name} waits for the device")
        result = func(*args, **kwargs)
        self.operations.append(lambda: _repeat(func, args, kwargs, result))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(Launch, "__call__", lambda *args: self._launch(*args)))
            for owner, name in HOST_FUNCTIONS:
                stack.enter_context(patch.object(owner, name, partial(self._copy, getattr(owner, name))))
            stack.enter_context(self)
            yield

    def _launch(self, *args: Any) -> None:
        self.operations.append(lambda: run_launch(*args))
        self._is_launching = True
        with _disable_current_modes():
            run_launch(*args)
        self._is_launching = False

    def _copy(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that copies between host and device; the interpreter of a launch may."""
        if not self._is_launching:
            raise RuntimeError(f"{function.__name__} copies between host and device")
        return function(*args, **kwargs)


run_launch: Final = Launch.__call__


def _has_open_size(name: str, args: Any, kwargs: Any) -> bool:
    has_mask = any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:]))
    return (
        (name == "where" and len(args) == 1)
        or (name == "index" and has_mask)
        or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        or name.startswith(("unique", "_unique"))
    )


def _repeat(func: Any, args: Any, kwargs: Any, recorded: Any) -> None:
    """Write the results of an operation where they were; views and results in the memory of arguments are there."""
    results = func(*args, **kwargs)
    for old, new in zip(tree_leaves(recorded), tree_leaves(results), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class RecordedCapture:
    """A `StepCapture` on the CPU. A replay destroys the results of all graphs before, as those of one pool may.

    Attributes:
        num_replays: how often a graph was replayed.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self._results: list[torch.Tensor] = []

    def __call__(self, compute: Callable[[], torch.Tensor]) -> CapturedStep:
        recorder = Recorder()
        with recorder.recording():
            result = compute()
        self._results.append(result)

        def replay() -> None:
            self.num_replays += 1
            for each in self._results:
                each.fill_(torch.nan)
            for operation in recorder.operations:
                operation()

        return CapturedStep(replay, result)
