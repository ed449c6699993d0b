"""The decoder that computes every declared model, and the function that builds it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.activations import ACTIVATIONS
from chairlift.kernels.attention import AttentionBackend, AttentionMetadata, AttentionShape, RotaryStep, StepContext
from chairlift.kernels.interface import NO_PROLOGUE, Kernels, LinearKernel, run_in_order
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.lora import LoraAdapters
from chairlift.kernels.recurrence import RecurrentState, StateStep
from chairlift.kernels.weights import Weights
from chairlift.models.declaration.model_config import ModelConfig, PerLayerInputsSpec, PredictorSpec
from chairlift.models.kv_layout import KVLayout
from chairlift.models.layer_builder import LayerBuilder
from chairlift.models.layers import Attention, DecoderLayer, attention_shape
from chairlift.models.registry import get_architecture
from chairlift.models.rotary import RotaryTable
from chairlift.models.torch_operations import fallback_notes, torch_operations

logger = logging.getLogger("chairlift")


class StepPlan(NamedTuple):
    """What all layers need in one step, see `StepContext`.

    Attributes:
        attention: `StepContext.plans`.
    """

    attention: tuple[Any, ...]
    states: StateStep | None = None


class PerLayerInputs:
    """multiplier * (norm(projection(embedding)) + table_multiplier * table[token]) for each layer, as in Gemma 3n.

    Args:
        num_layers: the number of layers of the model.
    """

    def __init__(self, builder: LayerBuilder, spec: PerLayerInputsSpec, num_layers: int) -> None:
        self._table = builder.embedding(spec.table)
        self._projection = builder.linear(spec.projection)
        self._norm = builder.norm_of_rows(spec.norm)
        self._spec = spec
        self._num_layers = num_layers
        self._new_rows = builder.new_rows

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Compute the inputs of the tokens of a step.

        Args:
            token_ids: int64 [T].
            embedded: [T, hidden_size], the input of the first layer.

        Returns:
            `StepContext.per_layer_inputs`, valid until the next call.
        """
        spec, num_tokens = self._spec, len(token_ids)
        inputs = self._new_rows(embedded, "per-layer inputs", (self._num_layers + 1) * spec.size)
        inputs = inputs.view(num_tokens, -1, spec.size)
        projected = self._norm(self._projection(embedded).view(-1, spec.size), None)
        looked_up = self._table(token_ids).view(num_tokens, -1, spec.size)
        found = projected.view_as(looked_up).add_(looked_up, alpha=spec.table_multiplier)
        torch.mul(found, spec.multiplier, out=inputs[:, 1:])
        return inputs


class Predictor:
    """The layer that predicts the token after the next one, for draft tokens.

    It computes norm(layer(projection([embedding_norm(embedding), hidden_norm(hidden)]))), see `PredictorSpec`.

    Args:
        head: the product with the matrix of the model's head, without a norm.
        index: the index of the layer.
    """

    def __init__(self, builder: LayerBuilder, spec: PredictorSpec, head: LinearKernel, index: int) -> None:
        self._embedding_norm = builder.norm_of_rows(spec.embedding_norm)
        self._hidden_norm = builder.norm_of_rows(spec.hidden_norm)
        self._projection = builder.linear(spec.projection)
        self.layer = DecoderLayer(builder, spec.layer, index)
        self._norm = builder.norm_of_rows(spec.norm)
        self.head = head

    def __call__(self, embedding: torch.Tensor, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Compute the hidden states of predicted tokens, [T, hidden_size], and write K and V of the layer.

        The next call may overwrite the result. The values of the arguments are lost.
        """
        rows = self._embedding_norm(embedding, None), self._hidden_norm(hidden, None)
        return self._norm(self.layer(self._projection(torch.cat(rows, dim=1)), step), None)


class DecoderModel:
    """The model that a declaration describes. The caller runs it under `torch.inference_mode`.

    Call `allocate_kv_cache` once, and `allocate_states` if layers have recurrent state. Then call in every step `plan`,
    `forward`, and `logits` for the rows that are sampled.

    Args:
        backends: the backend of each attention shape of the layers.
        max_model_len: the length of the longest sequence; None for max_position_embeddings.
        has_pooling: load the final norm as a separate kernel, for `final_hidden`.
        lora: the LoRA adapters of the rows of a step; None if the model has none.

    Attributes:
        num_allocations: how often KV memory or states were allocated.
        waits_for_host: whether a layer needs numbers that the device computes before it can go on.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        backends: dict[AttentionShape, AttentionBackend[Any]],
        max_model_len: int | None = None,
        has_pooling: bool = False,
        lora: LoraAdapters | None = None,
    ) -> None:
        self.config = config
        self.lora = lora
        self.num_allocations = 0
        self._planned: list[tuple[AttentionBackend[Any], int]] = []
        builder = LayerBuilder(config, weights, kernels, backends, lora)
        device = next(iter(backends)).device
        table = kernels.load_matrix(weights, config.embedding.parts, config.embedding.in_features)
        self.embedding = kernels.make_embedding(table)
        embedding_norm = config.embedding_norm
        self._embedding_norm = None if embedding_norm is None else builder.norm_of_rows(embedding_norm)
        self.position_table = builder.table(config.positions)
        self.project_in = None if config.project_in is None else builder.linear(config.project_in)
        max_positions = config.max_position_embeddings
        self.rotary_tables = [
            RotaryTable(rope, size, max_positions, device, max_model_len) for rope, size in config.ropes
        ]
        for rotary in self.rotary_tables:
            rotary.extend(1)  # An unknown scaling is an error when the model is loaded.
        inputs = config.per_layer_inputs
        self.per_layer_inputs = None if inputs is None else PerLayerInputs(builder, inputs, config.num_layers)
        self.layers = [DecoderLayer(builder, layer, index) for index, layer in enumerate(config.layers)]
        norm = builder.norm(config.final_norm)
        self.project_out: LinearKernel | None = None
        if config.project_out is not None:
            self.project_out, norm = builder.linear(config.project_out, norm), NO_PROLOGUE
        head = table
        if not config.tie_word_embeddings:
            head = kernels.load_matrix(weights, config.head.parts, config.head.in_features)
        self.lm_head = kernels.make_linear(head, None, norm)
        norm_spec = config.final_norm if has_pooling or config.predictor is not None else None
        self._final_norm = None if norm_spec is None else builder.norm_of_rows(norm_spec)
        self.predictor: Predictor | None = None
        if config.predictor is not None:  # LoRA adapters have no matrices for it.
            plain = LayerBuilder(config, weights, kernels, backends)
            predicted = kernels.make_linear(head, None, NO_PROLOGUE)
            self.predictor = Predictor(plain, config.predictor, predicted, config.num_layers)
        self.waits_for_host = builder.waits_for_host
        self._run_layers = run_in_order if torch_operations(config) else kernels.run_layers

    @property
    def attention_layers(self) -> dict[int, Attention]:
        """The attention of each layer that has one, by the index of the layer, as in `ModelConfig.attention_specs`."""
        layers = self.layers if self.predictor is None else [*self.layers, self.predictor.layer]
        return {index: layer.attention for index, layer in enumerate(layers) if layer.attention is not None}

    def allocate_kv_cache(self, num_blocks: int, block_size: int, layout: KVLayout | None = None) -> None:
        """Allocate zeroed KV memory for the block ids 0 to num_blocks - 1; the earlier memory is freed first.

        Args:
            layout: the groups of layers with separate block tables; None for one group.
        """
        self.num_allocations += 1
        layers = self.attention_layers
        layout = layout or KVLayout.one_group(self.config)
        for layer in layers.values():
            layer.set_kv_cache(None)
        groups = [[layers[index] for index in group] for group in layout.layers]
        pairs = ((layer.backend, number) for number, group in enumerate(groups) for layer in group)
        self._planned = list(dict.fromkeys(pairs))
        # The layers at one position of all groups share their memory, because a block belongs to one group at a time.
        largest = max(groups, key=len)
        for position, first in enumerate(largest):
            shared = first.kv_source
            cache = first.backend.allocate(num_blocks, block_size) if shared is None else layers[shared].kv_cache
            for number, group in enumerate(groups):
                if position < len(group):
                    layer = group[position]
                    layer.set_kv_cache(cache, self._planned.index((layer.backend, number)))

    def allocate_states(self, num_slots: int) -> None:
        """Allocate zeroed recurrent states for the slots 0 to num_slots - 1; the earlier ones are freed first."""
        self.num_allocations += 1
        for layer in self.layers:
            if layer.recurrence is not None:
                layer.recurrence.allocate_state(num_slots)

    def states(self, first: int) -> Iterator[RecurrentState]:
        """The recurrent states of each layer in the slots from `first` on."""
        for layer in self.layers:
            if layer.recurrence is not None:
                assert layer.recurrence.state is not None, "call allocate_states first"
                convolution, matrix = layer.recurrence.state
                yield RecurrentState(convolution[first:], None if matrix is None else matrix[first:])

    def plan(self, *metadata: AttentionMetadata, states: StateStep | None = None) -> StepPlan:
        """Return the plan of the step, as the argument of `forward`.

        Args:
            metadata: the metadata for each group of layers, which differ in block tables and slots.
            states: the recurrent states of the sequences, if layers have recurrent state.
        """
        for table in self.rotary_tables:
            table.extend(max(metadata[0].seq_lens_host))
        return StepPlan(tuple(backend.plan(metadata[group]) for backend, group in self._planned), states)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Run the layers on the tokens of one step, and write their K and V and their states.

        Args:
            token_ids, positions: int64 [T], packed as in the metadata of the plan.
            plan: the result of `plan` for this step.

        Returns:
            The hidden states for `logits`: [T, hidden_size].
        """
        x = self._embed(token_ids, positions)
        inputs = None if self.per_layer_inputs is None else self.per_layer_inputs(token_ids, x)
        return self._run_layers(self.layers, x, self._context(positions, plan, inputs))

    def _context(self, positions: torch.Tensor, plan: StepPlan, inputs: torch.Tensor | None = None) -> StepContext:
        rotations = tuple(RotaryStep(positions, table.values, table.query_scales) for table in self.rotary_tables)
        return StepContext(positions, rotations, plan.attention, inputs, plan.states)

    def predict(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        """Compute the hidden states of predicted tokens for `predicted_logits`, [T, hidden_size], and write K and V of
        the predictor. The next call may overwrite the result.

        Args:
            token_ids: int64 [T], the token after each position.
            positions: as for `forward`.
            hidden: [T, hidden_size], results of `final_hidden` or of this method; the values are lost.
            plan: a result of `plan`, which may be the plan of the step of `forward`.
        """
        assert self.predictor is not None, "the model has no predictor"
        embedding = self._embed(token_ids, positions)
        return self.predictor(embedding, hidden.to(embedding.dtype), self._context(positions, plan))

    def predicted_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits, float32 [N, vocab_size], of rows of the result of `predict`."""
        assert self.predictor is not None, "the model has no predictor"
        return self._scaled(self.predictor.head(hidden).float())

    def final_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states after the final norm, float32 [N, hidden_size], of rows of `forward`'s result."""
        return (hidden if self._final_norm is None else self._final_norm(hidden.clone(), None)).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits, float32 [N, vocab_size], of rows of `forward`'s result, [N, hidden_size]."""
        return self._scaled(self.lm_head(hidden if self.project_out is None else self.project_out(hidden)).float())

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply factor and soft cap of logits, in their memory."""
        if self.config.logits_multiplier != 1:
            logits = logits.mul_(self.config.logits_multiplier)
        cap = self.config.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token_ids)
        if self.config.embedding_multiplier != 1:
            x = x.mul_(self.config.embedding_multiplier)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_table is not None and self.config.positions is not None:
            x = x.add_(self.position_table[positions + self.config.positions.offset])
        return x if self._embedding_norm is None else self._embedding_norm(x, None)


def build_model(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: str = "torch",
    quantization: str | None = None,
    kv_cache_dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
    has_pooling: bool = False,
    max_loras: int = 0,
    max_lora_rank: int = 16,
) -> DecoderModel:
    """Build the model of a declaration and load its parameters.

    Args:
        dtype, device: the type and device of the activations, which `weights` must use as well.
        kernels: the name of the kernel set: "native", "triton" or "torch".
        quantization: the format of all matrices under native kernels, or None for the format of the file.
        kv_cache_dtype: the type of K and V in memory, or None for `dtype`.
        max_model_len, has_pooling: see DecoderModel.
        max_loras, max_lora_rank: the largest number of LoRA adapters and their largest rank.

    Raises:
        ModelLoadError: the architecture or one of its features is not supported, or a parameter cannot be read.
        ConfigError: there is no such kernel set, or it does not support the shape or types of the model.
    """
    get_architecture(config)
    _check_activations(config)
    kernel_set = get_kernels(kernels, quantization)
    target = torch.device(device)
    shapes = (attention_shape(spec, dtype, target, kv_cache_dtype) for spec in config.attention_specs.values())
    backends = {shape: kernel_set.attention(shape) for shape in dict.fromkeys(shapes)}
    lora = LoraAdapters(max_loras, max_lora_rank, dtype, target) if max_loras else None
    model = DecoderModel(config, weights, kernel_set, backends, max_model_len, has_pooling, lora)
    for note in (*kernel_set.notes(), *(fallback_notes(config) if kernel_set.name == "native" else [])):
        logger.info("%s", note)
    return model


def _check_activations(config: ModelConfig) -> None:
    branches = (branch for layer in config.layers for branch in (*layer.feed_forwards, layer.per_layer_branch))
    for name in {branch.activation for branch in branches if branch is not None}:
        if name not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ModelLoadError(f"activation must be one of {known}; got {name!r} ({config.name})")
