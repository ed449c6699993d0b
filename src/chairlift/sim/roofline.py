"""Seconds of a step from first principles: what it computes and what it reads, whichever takes longer.

The roofline model (Williams, Waterman and Patterson, CACM 2009), layer by layer:

    layer    = max(FLOPs, weight bytes) + max(attention FLOPs, KV bytes) + overhead + two all-reduces
    step     = layers * layer + max(LM head FLOPs, LM head bytes) + overhead

Left out: activations (small beside the weights), K and V written, sampling, swapping, pipeline parallelism, and any
difference of kernels but the two efficiencies of the device.
"""

from __future__ import annotations

from chairlift.errors import ConfigError
from chairlift.sim.cost_model import StepShape
from chairlift.sim.devices import Device
from chairlift.sim.model_shape import ModelShape


class Roofline:
    """A cost model of a model on a device, or on `tensor_parallel_size` of them.

    Tensor parallelism (Shoeybi et al., Megatron-LM, 2019, section 3) divides matrices, heads, and K and V evenly, the
    last as far as there are KV heads, and adds two ring all-reduces a layer of num_tokens * hidden_size values.

    Raises:
        ConfigError: tensor_parallel_size does not divide the heads, or the device has no link.
    """

    def __init__(self, model: ModelShape, device: Device, tensor_parallel_size: int = 1) -> None:
        self.model = model
        self.device = device
        self.tensor_parallel_size = tensor_parallel_size
        if tensor_parallel_size < 1 or model.num_heads % tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size} must divide the {model.num_heads} heads of {model.name}"
            )
        if tensor_parallel_size > 1 and not device.link_bandwidth:
            raise ConfigError(f"tensor_parallel_size={tensor_parallel_size}: {device.name} has no link to others")
        flop = 1 / (device.peak_flops * device.flops_efficiency)
        byte = 1 / (device.bandwidth * device.bandwidth_efficiency)
        share = 1 / tensor_parallel_size
        kv_share = -(-model.num_kv_heads // tensor_parallel_size) / model.num_kv_heads
        self._linear_token = 2 * model.weights_per_layer * flop * share
        self._linear_weights = model.weights_per_layer * model.bytes_per_weight * byte * share
        self._pair = 4 * model.num_heads * model.head_dim * flop * share
        self._context_token = model.kv_bytes_per_layer * byte * kv_share
        self._head_row = 2 * model.lm_head_weights * flop * share
        self._head_weights = model.lm_head_weights * model.bytes_per_weight * byte * share
        self._layer = device.layer_overhead
        self._exchanged_token = 0.0
        if tensor_parallel_size > 1:
            num_bytes = 2 * (1 - share) * model.hidden_size * model.bytes_per_kv_value
            self._exchanged_token = 2 * num_bytes / device.link_bandwidth
            self._layer += 2 * device.all_reduce_latency

    def seconds(self, shape: StepShape) -> float:
        num_tokens, _, num_sampled, num_context, num_pairs = shape
        layer = (
            max(num_tokens * self._linear_token, self._linear_weights)
            + max(num_pairs * self._pair, num_context * self._context_token)
            + num_tokens * self._exchanged_token
            + self._layer
        )
        head = max(num_sampled * self._head_row, self._head_weights) if num_sampled else 0.0
        return self.model.num_layers * layer + head + self.device.step_overhead

    def describe(self) -> list[tuple[str, str]]:
        model, device = self.model, self.device
        constants = [
            (
                "model",
                f"{model.name}: {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, "
                f"{model.num_kv_heads} KV heads, {model.weight_bytes / 1e9:.2f} GB read a step, "
                f"{model.kv_bytes_per_slot:,} bytes of K and V a token",
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
