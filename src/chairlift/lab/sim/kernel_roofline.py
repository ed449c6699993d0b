"""The roofline of each kernel of a step: a kernel takes the longer of its computation and its memory traffic.

In contrast to `Roofline`, which adds up the products of a layer, it has the kernels that GPUs run for a step, with the
activations that they read and write:

    product       weights, rows of inputs and results, the residual rows if the product is added to them
    norms         rows of the residual stream, read and written
    K and V       rows of query, key and value, read, normed, rotated and written: K and V to their blocks
    attention     K and V of the context, rows of queries and results
    activation    rows between the projections of the feed-forward network
    sampler       the logits of sampled rows, read once

Bytes and operations are the least that the kernels need. The efficiencies and overheads are those of the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import DEVICES, Device
from chairlift.lab.sim.model_shape import ExpertCost, ModelShape
from chairlift.lab.sim.roofline import Roofline
from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.matrix_spec import EXPERTS, MatrixSpec

OVERHEAD: Final = "launches and scheduling"


class KernelWork(NamedTuple):
    """The work of one call of a kernel, by the amounts of a step.

    Attributes:
        weights: bytes that a call reads in every step.
        token, seq, sampled, context: bytes for each token, request, sampled row, and token of the context.
        token_flops, sampled_flops, pair_flops: operations for each token, sampled row, and pair of query and key.
        experts: the mixture of experts whose chosen experts are read, or None.
        expert: bytes of an expert.
    """

    name: str
    weights: float = 0.0
    token: float = 0.0
    seq: float = 0.0
    sampled: float = 0.0
    context: float = 0.0
    token_flops: float = 0.0
    sampled_flops: float = 0.0
    pair_flops: float = 0.0
    experts: ExpertCost | None = None
    expert: float = 0.0

    def num_bytes(self, shape: StepShape) -> float:
        read = 0.0 if self.experts is None else self.experts.num_read(shape.num_tokens) * self.expert
        of_rows = shape.num_tokens * self.token + shape.num_sampled * self.sampled
        return self.weights + read + of_rows + shape.num_seqs * self.seq + shape.num_context * self.context

    def num_flops(self, shape: StepShape) -> float:
        of_rows = shape.num_tokens * self.token_flops + shape.num_sampled * self.sampled_flops
        return of_rows + shape.num_pairs * self.pair_flops


@dataclass(slots=True)
class KernelCost:
    """The calls of a kernel in one step, with their bytes, operations and seconds together."""

    name: str
    num_calls: int = 0
    num_bytes: float = 0.0
    num_flops: float = 0.0
    seconds: float = 0.0


class KernelRoofline(Roofline):
    """The cost model whose steps consist of kernels; arguments and errors as for `Roofline`."""

    def __init__(self, model: ModelShape, device: Device, tensor_parallel_size: int = 1) -> None:
        super().__init__(model, device, tensor_parallel_size)
        works = _step_works(model, device.bytes_per_value, tensor_parallel_size)
        self._works = list(Counter(works).items())
        self._flop = 1 / (device.peak_flops * device.flops_efficiency)
        self._byte = 1 / (device.bandwidth * device.bandwidth_efficiency)

    def costs(self, shape: StepShape) -> list[KernelCost]:
        """The kernels of a step in their order, those of the same name together, and the overheads."""
        costs: dict[str, KernelCost] = {}
        for work, count in self._works:
            if self._is_called(work, shape):
                cost = costs.setdefault(work.name, KernelCost(work.name))
                cost.num_calls += count
                cost.num_bytes += count * work.num_bytes(shape)
                cost.num_flops += count * work.num_flops(shape)
                cost.seconds += count * self._seconds(work, shape)
        return [*costs.values(), KernelCost(OVERHEAD, seconds=self._overheads(shape))]

    def seconds(self, shape: StepShape) -> float:
        kernels = sum(count * self._seconds(work, shape) for work, count in self._works if self._is_called(work, shape))
        return kernels + self._overheads(shape)

    def _seconds(self, work: KernelWork, shape: StepShape) -> float:
        return max(work.num_bytes(shape) * self._byte, work.num_flops(shape) * self._flop)

    def _is_called(self, work: KernelWork, shape: StepShape) -> bool:
        return not work.sampled or shape.num_sampled > 0

    def _overheads(self, shape: StepShape) -> float:
        layer = self._overhead + shape.num_tokens * self._exchanged_token
        return self.model.config.num_layers * layer + self.device.step_overhead


def device_roofline(model: ModelShape, device: Device, tensor_parallel_size: int = 1) -> Roofline:
    """The roofline of each kernel on a GPU, and that of a layer on a calibrated CPU, whose products fuse the others."""
    kind = KernelRoofline if device.name in DEVICES else Roofline
    return kind(model, device, tensor_parallel_size)


def _step_works(model: ModelShape, size: int, num_devices: int) -> Iterator[KernelWork]:
    """The works of a step on one of several devices, which share products, heads, K and V.

    Args:
        size: bytes of an activation.
    """
    config, share = model.config, 1 / num_devices
    yield KernelWork("embedding", token=2 * config.hidden_size * size)
    for layer in config.layers:
        yield from _layer_works(layer, model, size, num_devices)
    if model.state_bytes:
        yield KernelWork("recurrent states", seq=2 * model.state_bytes * share)
    head, vocab = config.head, config.vocab_size
    if config.final_norm is not None:
        yield KernelWork("norms", sampled=2 * config.final_norm.size * size)
    yield KernelWork(
        head.kernel,
        weights=head.num_weights * model.bytes_per_weight * share,
        sampled=(head.in_features + vocab * share) * size,
        sampled_flops=2 * head.num_weights * share,
    )
    yield KernelWork("sampler", sampled=vocab * size * share)


def _layer_works(layer: LayerSpec, model: ModelShape, size: int, num_devices: int) -> Iterator[KernelWork]:
    share = 1 / num_devices
    spec, inner_norms = layer.attention, () if layer.attention is None else layer.attention.norms
    yield from (KernelWork("norms", token=2 * norm.size * size) for norm in layer.norms if norm not in inner_norms)
    yield from (_product(layer, each, model, size, share) for each in layer.matrices if each.group != EXPERTS)
    if spec is not None:
        kv_bytes = spec.num_kept_memories * spec.key_size * model.bytes_per_kv_value
        kv_share = -(-spec.num_kv_heads // num_devices) / max(spec.num_kv_heads, 1)
        written = kv_bytes * kv_share if spec.kv_source is None else 0.0
        rows = (spec.row_size + spec.query_size) * share * size
        yield KernelWork("K and V", token=rows + written)
        yield KernelWork(
            "attention",
            token=2 * spec.query_size * size * share,
            context=kv_bytes * kv_share,
            pair_flops=4 * spec.query_size * share,
        )
    experts = ExpertCost.from_layer(layer)
    for network in layer.feed_forwards:
        rows_of_token = 1 if network.router is None or experts is None else experts.experts_per_token
        inner = network.inner_size * share * size * (3 if network.gated else 2)
        yield KernelWork("activation", token=rows_of_token * inner)
        if network.router is not None and experts is not None:
            rows = experts.experts_per_token * (network.up.in_features + network.down.out_features) * size
            yield KernelWork(
                "experts",
                token=rows + experts.experts_per_token * inner,
                token_flops=2 * experts.experts_per_token * experts.num_weights * share,
                experts=experts,
                expert=experts.num_weights * model.bytes_per_weight * share,
            )


def _product(layer: LayerSpec, matrix: MatrixSpec, model: ModelShape, size: int, share: float) -> KernelWork:
    mlp, attention = layer.feed_forward, layer.attention
    is_added = (layer.attention_adds_residual and attention is not None and matrix == attention.output) or (
        layer.feed_forward_adds_residual and mlp is not None and matrix == mlp.down
    )
    values = matrix.in_features + matrix.out_features * (2 if is_added else 1)
    return KernelWork(
        matrix.kernel,
        weights=matrix.num_weights * model.bytes_per_weight * share,
        token=values * size,
        token_flops=2 * matrix.num_weights * share,
    )
