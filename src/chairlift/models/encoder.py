"""The encoder that computes every declared model with an `EncoderSpec`, on the layers of decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from chairlift.kernels.attention import AttentionShape, KVCache, RotaryStep, StepContext
from chairlift.kernels.interface import run_in_order
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.packed_attention import PackedAttention, PackedTexts
from chairlift.kernels.weights import Weights
from chairlift.models.declaration.model_config import ClassifierSpec, EncoderSpec, ModelConfig
from chairlift.models.layer_builder import LayerBuilder
from chairlift.models.layers import DecoderLayer, attention_shape
from chairlift.models.rotary import RotaryTable


class EncoderModel:
    """The encoder that a declaration describes. The caller runs it under `torch.inference_mode`.

    Args:
        kernels, quantization: see `build_model`.
        num_threads: the number of texts whose attention is computed at the same time.

    Raises:
        ModelLoadError: a parameter cannot be read.
        ConfigError: the kernel set does not support the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        kernels: str,
        quantization: str | None,
        num_threads: int,
    ) -> None:
        assert config.encoder is not None
        self.config = config
        self._spec: EncoderSpec = config.encoder
        kernel_set = get_kernels(kernels, quantization)
        device = torch.device("cpu")
        run_all = partial(_run_all, map if num_threads == 1 else ThreadPoolExecutor(num_threads).map)
        shapes = (attention_shape(spec, dtype, device, dtype) for spec in config.attention_specs.values())
        backends: dict[AttentionShape, PackedAttention] = {
            shape: PackedAttention(shape, run_all) for shape in dict.fromkeys(shapes)
        }
        builder = LayerBuilder(config, weights, kernel_set, backends)
        self._embedding = builder.embedding(config.embedding)
        self._positions = builder.table(config.positions)
        types = builder.table(self._spec.token_types)
        self._types = None if types is None else types.clone()
        norm = config.embedding_norm
        self._embedding_norm = None if norm is None else builder.norm_of_rows(norm)
        self._rotary_tables = [
            RotaryTable(rope, size, config.max_position_embeddings, device, None) for rope, size in config.ropes
        ]
        self.layers = [DecoderLayer(builder, layer, index) for index, layer in enumerate(config.layers)]
        nothing = torch.empty(0)
        for layer in self.layers:
            assert layer.attention is not None, "encoders have attention in every layer"
            layer.attention.set_kv_cache(KVCache(nothing, nothing))
        self._final_norm = None if config.final_norm is None else builder.norm_of_rows(config.final_norm)
        classifier = self._spec.classifier
        self._classifier = None if classifier is None else _Classifier(builder, classifier, config.hidden_size)

    def forward(self, token_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Compute the hidden states of packed texts, float32 [T, hidden_size].

        Args:
            token_ids: int64 [T], the tokens of all texts, one text after the other. A token of type n has its id plus
                n times the size of the vocabulary.
            lengths: the number of tokens of each text.
        """
        positions = torch.cat([torch.arange(length) for length in lengths])
        types, token_ids = token_ids // self.config.vocab_size, token_ids % self.config.vocab_size
        x = self._embedding(token_ids)
        if self.config.embedding_multiplier != 1:
            x = x.mul_(self.config.embedding_multiplier)
        if self._positions is not None and self.config.positions is not None:
            x = x.add_(self._positions[positions + self.config.positions.offset])
        if self._types is not None:
            x = x.add_(self._types[types])
        x = x if self._embedding_norm is None else self._embedding_norm(x, None)
        for table in self._rotary_tables:
            table.extend(max(lengths))
        rotations = tuple(RotaryStep(positions, table.values) for table in self._rotary_tables)
        x = run_in_order(self.layers, x, StepContext(positions, rotations, (PackedTexts(list(lengths)),)))
        return (x if self._final_norm is None else self._final_norm(x, None)).float()

    def scores(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Compute the score of each text, float32 [N], from the hidden states of `forward`."""
        assert self._classifier is not None, "only cross-encoders have scores"
        return self._classifier(hidden, lengths)


class _Classifier:
    """The head of a cross-encoder; see ClassifierSpec."""

    def __init__(self, builder: LayerBuilder, spec: ClassifierSpec, size: int) -> None:
        load = builder.weights.tensor
        self._dense = load(f"{spec.dense}.weight", (size, size))
        self._bias = load(f"{spec.dense}.bias", (size,)) if spec.has_bias else None
        self._output, self._output_bias = load(f"{spec.output}.weight", (1, size)), load(f"{spec.output}.bias", (1,))
        self._norm = None if spec.norm is None else builder.norm_of_rows(spec.norm)
        self._pooling = spec.pooling
        self._activation = torch.tanh if spec.activation == "tanh" else torch.nn.functional.gelu

    def __call__(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        x = _pooled(hidden, lengths, self._pooling).to(self._dense.dtype)
        x = self._activation(torch.nn.functional.linear(x, self._dense, self._bias))
        x = x if self._norm is None else self._norm(x, None)
        return torch.nn.functional.linear(x, self._output, self._output_bias)[:, 0].float()


def _pooled(hidden: torch.Tensor, lengths: Sequence[int], pooling: str) -> torch.Tensor:
    """The state of the first token of each text, or the mean of its states."""
    texts = torch.split_with_sizes(hidden, list(lengths))
    return torch.stack([states[0] if pooling == "cls" else states.mean(0) for states in texts])


def _run_all(apply: Callable[..., Iterable[None]], work: Sequence[Callable[[], None]]) -> None:
    """Run functions by `map`, or by the `map` of a thread pool."""
    for _ in apply(_run_in_inference_mode, work):
        pass


def _run_in_inference_mode(work: Callable[[], None]) -> None:
    with torch.inference_mode():  # is a state of each thread
        work()
