"""The planned memory of the activations of the largest step of a model."""

from __future__ import annotations

from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.kernels.kernel_memory import (
    KernelMemory,
    LayerSizes,
    MemoryItem,
    NetworkSizes,
    RecurrenceSizes,
    StepSizes,
)
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec
from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.kv_layout import KVLayout
from chairlift.worker.memory import PROMPT_LOGPROB_ROWS

PREDICTOR_ROWS: Final = 6
"""Rows of hidden_size values that the predictor of a model needs for each token, beside the rows of its layer."""


def plan_activations(
    config: ModelConfig, memory: KernelMemory, limits: SchedulerConfig, block_size: int, layout: KVLayout | None = None
) -> list[MemoryItem]:
    """Plan an upper bound of the memory of the largest step, without weights, K and V.

    The kernel set plans the layers. Beside them are the per-layer inputs, T (4 L + 1) P values with P inputs for each
    of L layers and T tokens; the logits of sampled rows, or of prompt logprobs if they need more; and token ids, block
    tables of each group of layers, and penalties of every seat.
    """
    layout, tokens, seqs = layout or KVLayout.one_group(config), limits.max_num_batched_tokens, limits.max_num_seqs
    items = [*memory.step(_step_sizes(config, limits, block_size, layout))]
    if (inputs := config.per_layer_inputs) is not None:
        # Those of all layers, with one unused input, and while they are computed their projection, its norm and the
        # rows of the table.
        num_values = tokens * (4 * config.num_layers + 1) * inputs.size
        items.append(MemoryItem("per-layer inputs", num_values * memory.value_bytes))
    if config.predictor is not None:
        # Hidden states before and after their norm, embeddings, both side by side, and the projection of these; and the
        # last hidden state of each request.
        num_rows = PREDICTOR_ROWS * tokens + seqs
        items.append(MemoryItem("predictor", num_rows * config.hidden_size * memory.value_bytes))
    # int32 token ids and block tables, and index arrays of penalties (48 bytes a token).
    num_blocks = -(-limits.max_model_len // block_size)
    row_bytes = limits.max_model_len * 52 + len(layout.windows) * num_blocks * 4
    return [*items, _plan_logits(config, limits, memory), MemoryItem("request rows and penalties", seqs * row_bytes)]


def _step_sizes(config: ModelConfig, limits: SchedulerConfig, block_size: int, layout: KVLayout) -> StepSizes:
    groups = {index: group for group, indices in enumerate(layout.layers) for index in indices}
    branches = (branch for layer in config.layers for branch in (*layer.feed_forwards, layer.per_layer_branch))
    return StepSizes(
        num_tokens=limits.max_num_batched_tokens,
        num_seqs=limits.max_num_seqs,
        length=-(-limits.max_model_len // block_size) * block_size,
        block_size=block_size,
        hidden_size=config.hidden_size,
        is_fused=all(layer.is_fused for layer in config.layers),
        row_kernels=frozenset(branch.activation_kernel for branch in branches if branch is not None),
        layers=tuple(_layer_sizes(layer, groups.get(index, 0)) for index, layer in enumerate(config.layers)),
    )


def _layer_sizes(layer: LayerSpec, group: int) -> LayerSizes:
    networks = tuple(_network_sizes(network) for network in layer.feed_forwards)
    recurrence = None
    if (rec := layer.recurrence) is not None:
        num_heads = 0 if rec.rule is None else rec.rule.num_heads
        recurrence = RecurrenceSizes(
            rec.row_size, rec.output.in_features, rec.convolution.channels, num_heads, rec.state_values
        )
    if (spec := layer.attention) is None:
        return LayerSizes(group, 0, 0, 0, 1.0, None, False, True, networks, recurrence)
    return LayerSizes(
        group=group,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        sliding_window=spec.sliding_window,
        is_rotated=spec.rope is not None,
        has_plain_softmax=spec.logits_soft_cap is None and spec.sinks is None,
        networks=networks,
        recurrence=recurrence,
        num_inner_values=spec.num_inner_values,
    )


def _network_sizes(network: FeedForwardSpec) -> NetworkSizes:
    if (router := network.router) is None:
        return NetworkSizes(network.inner_size, network.gated)
    latent = sum(matrix.out_features for matrix in network.latent or ())
    return NetworkSizes(network.inner_size, network.gated, router.num_experts, router.routing.experts_per_token, latent)


def _plan_logits(config: ModelConfig, limits: SchedulerConfig, memory: KernelMemory) -> MemoryItem:
    vocab, prompt_rows = config.vocab_size, min(PROMPT_LOGPROB_ROWS, limits.max_num_batched_tokens)
    kinds = (
        ("logits and sampling", limits.max_logit_rows, memory.logit_bytes),
        ("logits: prompt logprobs", prompt_rows, memory.prompt_logit_bytes),
    )
    items = [MemoryItem(name, rows * vocab * size) for name, rows, size in kinds]
    return max(items, key=lambda item: item.num_bytes)
