"""PoolingConfig: how a model turns a text into a vector or a score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from chairlift.models.declaration.model_config import ModelConfig

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
PoolingTask = Literal["embed", "score"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

ROW_ACTIVATIONS: Final = frozenset(
    """CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU
    Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink""".split()  # noqa: SIM905
)
"""The classes of `torch.nn` that change each value of a row by itself, and have neither parameters nor arguments."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """A module of sentence-transformers that changes rows: hidden states of tokens, or the vector of a text.

        normalize     x / |x|
        dense         activation(W x + b), and with `has_residual` + x, or + R x if the sizes differ
        layer_norm    LayerNorm

    Attributes:
        file: the safetensors file with its parameters; "" without any.
        num_inputs, size: the number of values of a row before and after the step.
        activation: one of ROW_ACTIVATIONS.
    """

    kind: Literal["normalize", "dense", "layer_norm"]
    num_inputs: int
    size: int
    file: str = ""
    activation: str = "Identity"
    has_bias: bool = True
    has_residual: bool = False


@dataclass(frozen=True, slots=True)
class PooledTextConfig:
    """How a text, or a pair of texts, becomes tokens.

    Attributes:
        max_tokens: maximum number of tokens; None is the context of the model.
        prompt: is written before each text, and before the first text of a pair; in a conversation it is the message of
            the system.
        message_format: texts are rendered with the chat template, as messages with text ("flat") or with parts
            ("structured"); None if they are not.
        template_kwargs: further variables of the chat template.
        restores_suffix: the end of the chat template follows a text that was cut off.
        adds_special_tokens: the tokens for the beginning and the end of a text are added.
        cuts_start: the beginning of a long text is cut off instead of its end.
        has_token_types: the model reads the types that the tokenizer gives to tokens.
    """

    max_tokens: int | None = None
    prompt: str = ""
    message_format: Literal["flat", "structured"] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    restores_suffix: bool = True
    adds_special_tokens: bool = True
    cuts_start: bool = False
    has_token_types: bool = True


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model turns a text into a vector or a score.

    Attributes:
        task: "embed" for vectors, "score" for the scores of pairs of texts.
        size: the number of values of a vector.
        text: how texts become tokens.
        modes: the hidden states of the tokens of a text become one row by each of these modes, one after the other:
            the first or the last state, the maximum, the mean, the sum divided by the square root of the number of
            tokens, or the mean with weights 1, 2, 3, ...
        token_steps, steps: what changes the hidden states of tokens, and then the row of a text.
        includes_prompt: the tokens of `text.prompt` are pooled as well.
        num_unpooled: the number of the first tokens that are not pooled, which are those of the prompt.
        num_kept: the number of first values of a vector that are returned; None for all.
        similarity: compares two vectors.
        classifier_tokens: the logit of the second token after the last token is the score, minus the logit of the first
            one unless it is None; None for models that have a classifier.
        has_own_prompt: pairs are written in the prompt of Qwen3-Reranker, because the folder has no other form.
        activation: one of ROW_ACTIVATIONS, which turns a number into a score.
    """

    task: PoolingTask
    size: int
    text: PooledTextConfig = field(default_factory=PooledTextConfig)
    modes: tuple[PoolingMode, ...] = ("mean",)
    token_steps: tuple[RowStep, ...] = ()
    steps: tuple[RowStep, ...] = ()
    includes_prompt: bool = True
    num_unpooled: int = 0
    num_kept: int | None = None
    similarity: Similarity = "cosine"
    classifier_tokens: tuple[int | None, int] | None = None
    has_own_prompt: bool = False
    activation: str = "Sigmoid"

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1 before values are left out."""
        return bool(self.steps) and self.steps[-1].kind == "normalize"

    @property
    def vector_size(self) -> int:
        """The number of values of a vector that is returned."""
        return self.size if self.num_kept is None else min(self.size, self.num_kept)

    @property
    def description(self) -> str:
        """What the model computes, for the log."""
        if self.task == "score":
            return f"scores of pairs of texts ({self.activation})"
        normalized = ", normalized" if self.is_normalized else ""
        return f"vectors of {self.vector_size} values ({' and '.join(self.modes)} pooling{normalized})"

    @property
    def reads_instruction(self) -> bool:
        """Whether prompts have an instruction."""
        return self.has_own_prompt or self.text.message_format is not None

    @property
    def needs_head(self) -> bool:
        """Whether a decoder scores pairs by logits."""
        return self.task == "score" and not self.steps

    @property
    def reads_last_token_only(self) -> bool:
        """Whether the hidden states of other tokens have no part in the result."""
        return self.modes == ("lasttoken",)

    def without_unused_head(self, config: ModelConfig) -> ModelConfig:
        """Return the declaration without a separate LM head, which a decoder needs for scores only."""
        if self.needs_head or config.encoder is not None:
            return config
        return replace(config, tie_word_embeddings=True, unneeded_modules=(*config.unneeded_modules, "lm_head"))
