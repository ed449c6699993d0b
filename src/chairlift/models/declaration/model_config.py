"""A model as data: its layers, and what is around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from chairlift.models.declaration.attention_spec import AttentionSpec, RopeConfig
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import MatrixSpec, NormSpec
from chairlift.models.declaration.recurrence_spec import RecurrenceSpec
from chairlift.models.quantization import Quantization


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    """The inputs of the layers' `per_layer_branch`, of `size` values for each token and layer:

        multiplier * (norm(projection(embedding)) + table_multiplier * table[token])

    Attributes:
        table: the embedding table [vocab_size, layers * size].
        projection: the projection of the embedding to the inputs of all layers.
        norm: the norm of the projected input of a layer.
    """

    size: int
    table: MatrixSpec
    projection: MatrixSpec
    norm: NormSpec
    table_multiplier: float
    multiplier: float


@dataclass(frozen=True, slots=True)
class PositionTableSpec:
    """Learned positions. Row `position + offset` of `<name>.weight` [rows, size] is added to the embedding."""

    name: str
    rows: int
    size: int
    offset: int

    @property
    def num_values(self) -> int:
        return self.rows * self.size


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """The head of a cross-encoder, which computes one score from the hidden state of the first token:

        output(activation(dense(x))) or output(norm(activation(dense(x))))

    Attributes:
        dense, output: names of the matrices [hidden_size, hidden_size] and [1, hidden_size], with biases.
        activation: "tanh" or "gelu".
        norm: the norm of the result of the activation, or None.
        has_bias: whether the dense matrix has a bias.
        pooling: the hidden state that the head reads: "cls" or "mean".
    """

    dense: str
    output: str
    activation: Literal["tanh", "gelu"]
    norm: NormSpec | None = None
    has_bias: bool = True
    pooling: Literal["cls", "mean"] = "cls"


@dataclass(frozen=True, slots=True)
class PredictorSpec:
    """A layer that predicts the token after the next one (multi-token prediction, MTP; Gloeckle et al., 2024):

        head(norm(layer(projection([embedding_norm(E[next token]), hidden_norm(h)]))))

    h is the hidden state of a token after the final norm, and the layer has the position of that token. A further token
    is predicted from the result of `norm` in place of h. Embedding and head belong to the model.

    Attributes:
        layer: a layer with attention, whose K and V are beside the model's K and V.
    """

    layer: LayerSpec
    projection: MatrixSpec
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    norm: NormSpec

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms in addition to the layer's norms."""
        return self.embedding_norm, self.hidden_norm, self.norm


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What distinguishes an encoder from a decoder: the tokens of a text attend to one another in both directions.

    Attributes:
        token_types: the table of token types, whose first row applies to single texts; or None.
        classifier: the head of a cross-encoder, or None.
    """

    token_types: PositionTableSpec | None = None
    classifier: ClassifierSpec | None = None

    @property
    def num_token_types(self) -> int:
        return 1 if self.token_types is None else self.token_types.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The declaration of a text model, and the special tokens of its checkpoint.

    Attributes:
        architecture: a key of `models.registry.ARCHITECTURES` ("llama", "opt"), which the registry adds.
        wrapper: the key of `models.reading.wrappers.WRAPPERS` of the class whose text model it is, or None.
        name: the model type in the file ("llama", "mistral", "qwen2", "qwen3", "opt").
        embedding: the embedding table [vocab_size, width of a word vector].
        head: the matrix that computes the logits; with tie_word_embeddings it is the embedding's.
        final_norm: the norm before the head, or before project_out if there is one.
        project_in, project_out: the projections from the width of a word vector to hidden_size and back, or None if the
            widths are equal.
        embedding_norm: the norm of the sum of embeddings, or None.
        embedding_multiplier, logits_multiplier: the factors of the embedding's and of the head's output.
        logits_soft_cap: c in c * tanh(logits / c), which is applied after the multiplier, or None.
        unneeded_modules: the modules of which checkpoints may have parameters that no layer needs.
        per_layer_inputs: the embeddings that layers read in their `per_layer_branch`, or None.
        encoder: what the model has as an encoder; None for a decoder, whose tokens attend to earlier ones.
        num_unread_layers: the number of layers behind the others in safetensors files, which predict further tokens
            and are not loaded.
        predictor: the layer that proposes draft tokens; None if there is none, or none is needed.
        eos_token_ids: all tokens that end a sequence, including the tokens of generation_config.json.
        dtype: the type of the file's tensors ("float32", "float16", "bfloat16"); "float16" if they are quantized.
        quantization: the quantization of a Hugging Face checkpoint, or None.
    """

    name: str
    architecture: str = ""
    wrapper: str | None = None
    hidden_size: int
    max_position_embeddings: int
    embedding: MatrixSpec
    layers: tuple[LayerSpec, ...]
    head: MatrixSpec
    final_norm: NormSpec | None
    tie_word_embeddings: bool = False
    positions: PositionTableSpec | None = None
    project_in: MatrixSpec | None = None
    project_out: MatrixSpec | None = None
    embedding_norm: NormSpec | None = None
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    unneeded_modules: tuple[str, ...] = ()
    per_layer_inputs: PerLayerInputsSpec | None = None
    encoder: EncoderSpec | None = None
    predictor: PredictorSpec | None = None
    num_unread_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    quantization: Quantization | None = None

    def as_encoder(self, window: Callable[[int], int]) -> ModelConfig:
        """Return the declaration of an encoder with the layers of this decoder.

        Args:
            window: window of the decoder -> the distance from which on tokens do not see one another.

        Raises:
            ValueError: it has what only decoders compute; the message names it.
        """
        layers = []
        for layer in self.layers:
            spec = layer.attention
            if spec is None or spec.latent is not None or layer.per_layer_branch is not None:
                raise ValueError("recurrent layers, compressed keys or embeddings of layers")
            if spec.logits_soft_cap is not None or spec.sinks is not None:
                raise ValueError("soft caps or sinks of attention")
            size = spec.sliding_window
            layers.append(
                replace(layer, attention=replace(spec, sliding_window=None if size is None else window(size)))
            )
        return replace(
            self, layers=tuple(layers), tie_word_embeddings=True, encoder=EncoderSpec(), unneeded_modules=("lm_head",)
        )

    def with_recurrences(self, recurrent: Sequence[bool], declare: Callable[[int], RecurrenceSpec]) -> ModelConfig:
        """Return the declaration with a recurrence in place of attention in some layers, under the same norms.

        Args:
            recurrent: whether each layer has a recurrence.
            declare: index of a layer -> its recurrence.
        """
        layers = list(self.layers)
        for index in range(len(layers)):
            if recurrent[index]:
                layers[index] = replace(
                    layers[index],
                    attention=None,
                    attention_norms=BranchNorms(),
                    recurrence=declare(index),
                    recurrence_norms=layers[index].attention_norms,
                )
        return replace(self, layers=tuple(layers))

    @property
    def vocab_size(self) -> int:
        return self.embedding.out_features

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, and the predictor's layer, whose index is the number of the others."""
        return self.layers if self.predictor is None else (*self.layers, self.predictor.layer)

    @property
    def kv_values_per_token(self) -> int:
        """The number of K and V values of one token in all layers."""
        return sum(spec.num_kept_values for spec in self.attention_specs.values())

    @property
    def attention_specs(self) -> dict[int, AttentionSpec]:
        """The attention of each layer that has one, by the index of the layer; the predictor's comes last."""
        layers = enumerate(self.all_layers)
        return {index: layer.attention for index, layer in layers if layer.attention is not None}

    @property
    def state_values_per_sequence(self) -> int:
        """The number of float32 values of recurrent state of a sequence in all layers."""
        return sum(layer.recurrence.state_values for layer in self.layers if layer.recurrence is not None)

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The distinct rotary embeddings, each with the head size that it rotates."""
        found = ((spec.rope, spec.head_dim) for spec in self.attention_specs.values())
        return tuple(dict.fromkeys((rope, head_dim) for rope, head_dim in found if rope is not None))

    @property
    def matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix in memory, each once. A tied head shares the embedding's matrix."""
        yield self.embedding
        if self.per_layer_inputs is not None:
            yield self.per_layer_inputs.table
        for layer in self.all_layers:
            yield from layer.matrices
        yield from self._projections
        if not self.tie_word_embeddings:
            yield self.head

    @property
    def read_matrices(self) -> Iterator[MatrixSpec]:
        """Every matrix that a step reads completely, including the head's. Of embedding tables a step reads some
        rows."""
        for layer in self.all_layers:
            yield from layer.matrices
        yield from self._projections
        yield self.head_matrix

    @property
    def head_matrix(self) -> MatrixSpec:
        """The matrix that computes the logits, which is the embedding's if the head is tied."""
        return replace(self.head, parts=self.embedding.parts) if self.tie_word_embeddings else self.head

    @property
    def norm_names(self) -> Iterator[str]:
        """The names of all norms that have parameters."""
        inputs, classifier = self.per_layer_inputs, None if self.encoder is None else self.encoder.classifier
        norms = (
            *(norm for layer in self.all_layers for norm in layer.norms),
            None if inputs is None else inputs.norm,
            self.embedding_norm,
            self.final_norm,
            *(() if self.predictor is None else self.predictor.norms),
            None if classifier is None else classifier.norm,
        )
        yield from (norm.name for norm in norms if norm is not None and norm.name is not None)

    @property
    def _projections(self) -> tuple[MatrixSpec, ...]:
        inputs = None if self.per_layer_inputs is None else self.per_layer_inputs.projection
        predicting = None if self.predictor is None else self.predictor.projection
        found = (self.project_in, self.project_out, inputs, predicting)
        return tuple(matrix for matrix in found if matrix is not None)
