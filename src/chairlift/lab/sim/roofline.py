"""The roofline cost model: a part of a step takes the longer of its computation and its memory traffic.

Source: Williams, Waterman and Patterson, CACM 2009; applied layer by layer:

    layer    = max(FLOPs, weight bytes) + max(attention FLOPs, KV bytes) + overhead + two all-reduces
    step     = layers * layer + max(LM head FLOPs, LM head bytes) + overhead

The weight bytes of a mixture of experts count the expected number of experts that the tokens of the step choose.

The model omits activations (small compared with the weights), writing K and V, sampling, swapping, pipeline
parallelism, and all differences between kernels except the two efficiencies of the device.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from chairlift.errors import ConfigError
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.model_shape import ExpertCost, ModelShape
from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.matrix_spec import EXPERTS


def block_copy_seconds(block_size: int, model: ModelShape, device: Device) -> float:
    """The seconds in which a block is copied from or to the swap space in the memory of the host.

    K and V of each layer are copied by themselves, so a block takes its bytes over the bandwidth to the host, and the
    latency of two copies for each layer.
    """
    bandwidth = device.host_bandwidth or device.bandwidth / 2  # a copy within a memory reads and writes it
    seconds = block_size * model.kv_bytes_per_slot / (bandwidth * device.bandwidth_efficiency)
    return seconds + 2 * len(model.config.attention_specs) * device.copy_latency


class LayerSeconds(NamedTuple):
    """The seconds that the parts of one layer take.

    Attributes:
        token: the linear layers for one token, without norms and biases.
        weights: reading the weights.
        pair: attention for one (query, key) pair.
        context_token: reading K and V of one token.
        experts: the mixture of experts, or None.
        expert: reading one expert.
    """

    token: float
    weights: float
    pair: float
    context_token: float
    experts: ExpertCost | None
    expert: float


class Roofline:
    """The cost model of a model on one device, or on `tensor_parallel_size` devices.

    Tensor parallelism (Shoeybi et al., Megatron-LM, 2019, section 3) divides matrices, heads, and K and V evenly; a KV
    head is not divided. It adds two ring all-reduces of num_tokens * hidden_size values per layer.

    Raises:
        ConfigError: tensor_parallel_size does not divide the heads, or the device has no link.
    """

    def __init__(self, model: ModelShape, device: Device, tensor_parallel_size: int = 1) -> None:
        self.model = model
        self.device = device
        self.tensor_parallel_size = tensor_parallel_size
        for heads in {spec.num_heads for spec in model.config.attention_specs.values()}:
            if tensor_parallel_size < 1 or heads % tensor_parallel_size:
                raise ConfigError(
                    f"tensor_parallel_size={tensor_parallel_size} must divide the {heads} heads of {model.name}"
                )
        if tensor_parallel_size > 1 and not device.link_bandwidth:
            raise ConfigError(f"tensor_parallel_size={tensor_parallel_size}: {device.name} has no link to others")
        flop = 1 / (device.peak_flops * device.flops_efficiency)
        byte = 1 / (device.bandwidth * device.bandwidth_efficiency)
        share = 1 / tensor_parallel_size
        layers = Counter(self._layer_seconds(layer, flop, byte) for layer in model.config.layers)
        self._layers = [(*layer, count) for layer, count in layers.items()]
        self._head_row = 2 * model.lm_head_weights * flop * share
        self._head_weights = model.lm_head_weights * model.bytes_per_weight * byte * share
        self._state = 2 * model.state_bytes * byte * share  # read and written once in a step
        self._overhead = device.layer_overhead
        self._exchanged_token = 0.0
        if tensor_parallel_size > 1:
            num_bytes = 2 * (1 - share) * model.config.hidden_size * model.bytes_per_kv_value
            self._exchanged_token = 2 * num_bytes / device.link_bandwidth
            self._overhead += 2 * device.all_reduce_latency

    def _layer_seconds(self, layer: LayerSpec, flop: float, byte: float) -> LayerSeconds:
        model, num_devices = self.model, self.tensor_parallel_size
        share, pair, context_token = 1 / num_devices, 0.0, 0.0
        if (spec := layer.attention) is not None:
            kv_share = -(-spec.num_kv_heads // num_devices) / max(spec.num_kv_heads, 1)
            kv_bytes = round(spec.num_kept_memories * spec.key_size * model.bytes_per_kv_value)
            pair, context_token = 4 * spec.query_size * flop * share, kv_bytes * byte * kv_share
        num_weights = sum(matrix.num_weights for matrix in layer.matrices if matrix.group != EXPERTS)
        token_weights, expert_weights, experts = num_weights, 0, ExpertCost.from_layer(layer)
        if experts is not None:
            expert_weights = experts.num_weights
            token_weights += experts.experts_per_token * expert_weights
        return LayerSeconds(
            token=2 * token_weights * flop * share,
            weights=num_weights * model.bytes_per_weight * byte * share,
            pair=pair,
            context_token=context_token,
            experts=experts,
            expert=expert_weights * model.bytes_per_weight * byte * share,
        )

    def seconds(self, shape: StepShape) -> float:
        num_tokens, num_seqs, num_sampled, num_context, num_pairs = shape
        layers = 0.0
        for token, weights, pair, context_token, experts, expert, count in self._layers:
            if experts is not None:
                weights += experts.num_read(num_tokens) * expert
            layers += count * (
                max(num_tokens * token, weights)
                + max(num_pairs * pair, num_context * context_token)
                + num_tokens * self._exchanged_token
                + self._overhead
            )
        head = max(num_sampled * self._head_row, self._head_weights) if num_sampled else 0.0
        return layers + head + num_seqs * self._state + self.device.step_overhead

    def constants(self) -> list[tuple[str, str]]:
        """Returns the constants of the model as (name, value with unit), to be printed with results."""
        model, device = self.model, self.device
        attention = list(model.config.attention_specs.values())
        heads = "/".join(str(count) for count in dict.fromkeys(spec.num_heads for spec in attention))
        kv_heads = "/".join(str(count) for count in dict.fromkeys(spec.num_kv_heads for spec in attention))
        has_experts = any(ExpertCost.from_layer(layer) for layer in model.config.layers)
        weights = "of weights, of which a step reads the chosen experts" if has_experts else "read per step"
        constants = [
            (
                "model",
                f"{model.name}: {model.config.num_layers} layers, hidden {model.config.hidden_size}, {heads} heads, "
                f"{kv_heads} KV heads, {model.weight_bytes / 1e9:.2f} GB {weights}, "
                f"{model.kv_bytes_per_slot:,} bytes of K and V per token"
                + (f", {model.state_bytes:,} bytes of recurrent state per request" if model.state_bytes else ""),
            ),
            (
                "device",
                f"{device.name}: {device.peak_flops / 1e12:.4g} TFLOP/s, {device.bandwidth / 1e9:,.4g} GB/s "
                f"({device.source})",
            ),
            ("flops_efficiency", f"{device.flops_efficiency:g}"),
            ("bandwidth_efficiency", f"{device.bandwidth_efficiency:g}"),
            ("step_overhead", f"{device.step_overhead * 1e3:g} ms"),
            ("layer_overhead", f"{device.layer_overhead * 1e6:g} us"),
        ]
        if self.tensor_parallel_size > 1:
            constants += [
                ("tensor_parallel_size", str(self.tensor_parallel_size)),
                ("link_bandwidth", f"{device.link_bandwidth / 1e9:g} GB/s"),
                ("all_reduce_latency", f"{device.all_reduce_latency * 1e6:g} us"),
            ]
        return constants
