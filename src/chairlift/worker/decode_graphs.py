"""DecodeGraphs: a model whose decode steps are captured once, and then replayed as CUDA graphs.

A decode step of a model of 32 layers launches about 300 kernels, each of which costs the host more time than the device
needs for it. A replay launches all of them at once, with the addresses and numbers of the capture. So the inputs of a
step are copied into memory of the graph, and the number of rows is fixed: a step of fewer requests has rows of
padding, which see no keys and write none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, NamedTuple, Protocol

import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.graph_sizes import graph_sizes
from chairlift.kernels.recurrence import StateStep
from chairlift.worker.request_rows import NO_STATE, RequestRows
from chairlift.worker.runner_model import RunnerModel

logger = logging.getLogger("chairlift")


class CapturedStep(NamedTuple):
    """A captured function.

    Attributes:
        replay: computes it again, without waiting for the device.
        result: the memory of its result, which each replay overwrites.
    """

    replay: Callable[[], None]
    result: torch.Tensor


class StepCapture(Protocol):
    """Captures a function of tensors that are always in the same memory."""

    def __call__(self, compute: Callable[[], torch.Tensor]) -> CapturedStep:
        """Run the function at least once, and capture it.

        Raises:
            RuntimeError: the function waits for the device.
        """
        ...


CAPTURING: Final = Lock()
"""Is held during a capture, of which a process may have one at a time."""


class CudaCapture:
    """Captures CUDA graphs, which share the memory of intermediate results, because they never run at the same time.

    All of them are captured on one stream of their own: torch frees the workspaces of cuBLAS for the stream of a graph
    that is deleted, and never frees those of other streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], torch.Tensor]) -> CapturedStep:
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        with CAPTURING, torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # `graph` does not leave the stream if the capture fails.
                compute()  # Compiles kernels and allocates workspaces, which a capture must not.
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                    result = compute()
            torch.cuda.current_stream().wait_stream(stream)
        return CapturedStep(graph.replay, result)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a decode step of N rows, in memory that all graphs share.

    Attributes:
        token_ids, positions: int64 [N].
        metadata: the metadata for each group of layers, for sequences of any length.
        states: the recurrent states of the rows; None if the model has none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: tuple[AttentionMetadata, ...]
    states: StateStep | None

    @classmethod
    def allocate(cls, rows: RequestRows, has_states: bool) -> StepInputs:
        """Allocate the inputs of a step of all rows."""
        count, device = rows.max_num_seqs, rows.device

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        metadata = [
            AttentionMetadata(
                query_start_loc=starts,
                seq_lens=filled(0, count),
                block_tables=filled(0, count, rows.max_blocks_per_seq),
                slot_mapping=filled(-1, count, dtype=torch.int64),
                query_start_loc_host=list(range(count + 1)),
                seq_lens_host=[rows.max_model_len] * count,
                block_size=rows.block_size,
                is_captured=True,
            )
            for _ in rows.block_tables
        ]
        states = StateStep(starts, filled(NO_STATE, count), filled(NO_STATE, count), filled(0, 0, 3))
        token_ids, positions = (filled(0, count, dtype=torch.int64) for _ in range(2))
        return cls(token_ids, positions, tuple(metadata), states if has_states else None)

    def first_rows(self, count: int) -> StepInputs:
        """The inputs of the first rows, in the same memory."""
        metadata = [
            replace(
                each,
                query_start_loc=each.query_start_loc[: count + 1],
                seq_lens=each.seq_lens[:count],
                block_tables=each.block_tables[:count],
                slot_mapping=each.slot_mapping[:count],
                query_start_loc_host=each.query_start_loc_host[: count + 1],
                seq_lens_host=each.seq_lens_host[:count],
            )
            for each in self.metadata
        ]
        states = self.states
        if states is not None:
            starts, sources, slots = states.query_start_loc[: count + 1], states.sources[:count], states.slots[:count]
            states = StateStep(starts, sources, slots, states.snapshots)
        return StepInputs(self.token_ids[:count], self.positions[:count], tuple(metadata), states)

    def padded_metadata(self, metadata: Sequence[AttentionMetadata]) -> list[AttentionMetadata]:
        """The metadata of a step of at most as many rows, whose other rows see no keys, in the memory of this."""
        missing = len(self.token_ids) - len(metadata[0].seq_lens_host)
        return [
            replace(mine, seq_lens_host=[*each.seq_lens_host, *[0] * missing], is_captured=False)
            for mine, each in zip(self.metadata, metadata, strict=True)
        ]

    def fill(self, metadata: Sequence[AttentionMetadata], states: StateStep | None) -> None:
        """Copy what `RunnerModel.plan` gets; rows of padding write nothing."""
        for mine, each in zip(self.metadata, metadata, strict=True):
            _fill(mine.seq_lens, each.seq_lens, 0)
            _fill(mine.slot_mapping, each.slot_mapping, -1)
            count, width = each.block_tables.shape
            mine.block_tables[:count, :width].copy_(each.block_tables)
        if self.states is not None and states is not None:
            _fill(self.states.sources, states.sources, NO_STATE)
            _fill(self.states.slots, states.slots, NO_STATE)


def _fill(memory: torch.Tensor, values: torch.Tensor, padding: int) -> None:
    memory[: len(values)].copy_(values)
    if len(values) < len(memory):
        memory[len(values) :].fill_(padding)


class DecodeGraph:
    """The decode step of a fixed number of rows."""

    def __init__(self, model: RunnerModel, inputs: StepInputs, capture: StepCapture) -> None:
        self._model, self._inputs = model, inputs
        self._plan = model.plan(*inputs.metadata, states=inputs.states)
        self._step = capture(lambda: model.forward(inputs.token_ids, inputs.positions, self._plan))

    def fill(self, metadata: Sequence[AttentionMetadata], states: StateStep | None) -> bool:
        """Prepare a replay for a step of at most as many rows; returns False if the graph cannot compute it."""
        plan = self._model.plan(*self._inputs.padded_metadata(metadata), states=self._inputs.states)
        if not all(mine.refill(each) for mine, each in zip(self._plan.attention, plan.attention, strict=True)):
            return False
        self._inputs.fill(metadata, states)
        return True

    def replay(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute int64 [N], int64 [N] -> hidden states [N, hidden], which the next replay overwrites."""
        self._inputs.token_ids[: len(token_ids)].copy_(token_ids)
        self._inputs.positions[: len(positions)].copy_(positions)
        self._step.replay()
        return self._step.result[: len(token_ids)]


class CapturedModel(RunnerModel, Protocol):
    """A model whose attention plans can be refilled.

    Attributes:
        num_allocations: how often KV memory or states were allocated, whose addresses a graph contains.
    """

    num_allocations: int


class DecodeGraphs:
    """A `RunnerModel` that replays decode steps, and computes all other steps as they are.

    Args:
        model: a model with allocated KV memory. Once that is allocated again, nothing is replayed.
        rows: the rows of the running requests.
        has_states: whether layers have recurrent state.

    Raises:
        RuntimeError: a step cannot be captured, or the first replay has other bits than the model itself.
    """

    def __init__(self, model: CapturedModel, rows: RequestRows, has_states: bool, capture: StepCapture) -> None:
        self._model, self._num_allocations = model, model.num_allocations
        inputs = StepInputs.allocate(rows, has_states)
        sizes = graph_sizes(rows.max_num_seqs)
        # The largest first: the others find the memory of its intermediate results.
        self._graphs = {size: DecodeGraph(model, inputs.first_rows(size), capture) for size in reversed(sizes)}
        self._sizes = sizes
        for size in sizes:
            self._check(inputs, size, rows.max_model_len)

    def plan(self, *metadata: AttentionMetadata, states: StateStep | None = None) -> Any:
        """As `RunnerModel.plan`."""
        graph = self._graph_of(metadata, states)
        if graph is not None and graph.fill(metadata, states):
            return graph
        return self._model.plan(*metadata, states=states)

    def _graph_of(self, metadata: Sequence[AttentionMetadata], states: StateStep | None) -> DecodeGraph | None:
        """The smallest graph with enough rows; None if the step has a sequence of several tokens, or keeps states."""
        count = len(metadata[0].seq_lens_host)
        if metadata[0].query_start_loc_host[-1] != count or (states is not None and len(states.snapshots)):
            return None
        if self._model.num_allocations != self._num_allocations:
            return None
        return self._graphs[next(size for size in self._sizes if size >= count)]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """As `RunnerModel.forward`; the next step may overwrite the result."""
        if isinstance(plan, DecodeGraph):
            return plan.replay(token_ids, positions)
        return self._model.forward(token_ids, positions, plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `RunnerModel.logits`."""
        return self._model.logits(hidden)

    def _check(self, inputs: StepInputs, size: int, longest: int) -> None:
        """Compare a replay for sequences of different lengths with the model itself. They read block 0, where one of
        them writes."""
        device, inputs = inputs.token_ids.device, inputs.first_rows(size)
        slots = torch.full((size,), -1, dtype=torch.int64, device=device)
        slots[0] = 0
        plan: Any = None
        while not isinstance(plan, DecodeGraph):  # Shorter sequences fit into its scratch memory.
            assert longest, "a graph has room for sequences of one token"
            lengths = [1 + (longest - 1 + 37 * index) % longest for index in range(size)]
            seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
            metadata = [
                replace(each, seq_lens=seq_lens, seq_lens_host=lengths, slot_mapping=slots, is_captured=False)
                for each in inputs.metadata
            ]
            plan, longest = self.plan(*metadata, states=inputs.states), longest // 2
        step = torch.arange(size, device=device) % 2, seq_lens.long() - 1
        expected = self._model.forward(*step, self._model.plan(*metadata, states=inputs.states))
        if not torch.equal(self.forward(*step, plan).view(torch.uint8), expected.view(torch.uint8)):
            raise RuntimeError(f"the replay of {size} rows differs from the step itself")


def with_decode_graphs(model: CapturedModel, rows: RequestRows, has_states: bool, capture: StepCapture) -> RunnerModel:
    """Capture the decode steps of a model. If one cannot be captured, the log says why, and the model itself runs."""
    try:
        with torch.inference_mode():
            return DecodeGraphs(model, rows, has_states, capture)
    except Exception as error:  # Of torch, Triton or the driver; a capture ends with another error than it had.
        reason = error.__context__ or error
        what = type(reason).__name__
        logger.warning("Decode steps run without CUDA graphs, which costs the host time: %s: %s", what, reason)
        return model


def find_capture(kernels: str, device: torch.device) -> StepCapture | None:
    """The capture for a kernel set on a device; None if steps cannot be captured there."""
    return CudaCapture(device) if kernels == "triton" and device.type == "cuda" else None
