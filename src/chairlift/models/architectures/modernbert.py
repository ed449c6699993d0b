"""ModernBERT (Warner et al., 2024): an encoder with rotary embeddings, norms before the branches and a gated GELU.

Every third layer attends to the whole text, the others to the nearest tokens on both sides.
"""

from __future__ import annotations

from typing import Final

from chairlift.models.declaration.attention_spec import RopeConfig, declare_attention
from chairlift.models.declaration.feed_forward_spec import declare_network
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ClassifierSpec, EncoderSpec, ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.layer_fields import check_single_score, read_layer_windows

ACTIVATIONS: Final = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


def _read(fields: ConfigFields, classifier: bool) -> ModelConfig:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    exact_quotient(fields, "hidden_size", hidden, "num_attention_heads", heads)
    eps, inner = fields.number("norm_eps", 1e-5), fields.integer("intermediate_size")
    vocab, count = fields.integer("vocab_size"), fields.integer("num_hidden_layers", high=4096)
    activation = ACTIVATIONS[fields.choice("hidden_activation", ACTIVATIONS, "gelu")]
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        fields.allow_only(key, False, "no published model has these biases")
    thetas, is_global = _read_positions(fields, count)
    fields.ignore("tie_word_embeddings")  # concerns the head of masked language models
    fields.ignore("decoder_bias", "layer_norm_eps")
    # A token attends to half of the window on each side.
    window = fields.integer("local_attention", 128) // 2 + 1

    def norm(name: str) -> NormSpec:
        return NormSpec("layer_norm", name, hidden, eps, has_bias=False)

    def layer(index: int) -> LayerSpec:
        root = f"layers.{index}"
        attention = declare_attention(
            ((f"{root}.attn.Wqkv", 3 * hidden),),
            f"{root}.attn.Wo",
            hidden,
            heads,
            rope=RopeConfig(theta=thetas[is_global[index]]),
            sliding_window=None if is_global[index] else window,
        )
        up, down = ((f"{root}.mlp.Wi", 2 * inner),), f"{root}.mlp.Wo"
        feed_forward = declare_network(up, down, hidden, activation, gated=True)
        before = None if index == 0 else norm(f"{root}.attn_norm")
        return LayerSpec(
            attention, BranchNorms(before=before), feed_forward, BranchNorms(before=norm(f"{root}.mlp_norm"))
        )

    return ModelConfig(
        name="modernbert",
        hidden_size=hidden,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        embedding=MatrixSpec(EMBEDDING, EMBEDDING, (("embeddings.tok_embeddings", vocab),), hidden),
        layers=tuple(layer(index) for index in range(count)),
        final_norm=norm("final_norm"),
        head=MatrixSpec(LM_HEAD, LM_HEAD, (("embeddings.tok_embeddings", vocab),), hidden),
        tie_word_embeddings=True,
        embedding_norm=norm("embeddings.norm"),
        encoder=EncoderSpec(classifier=_read_classifier(fields, norm("head.norm")) if classifier else None),
    )


def _read_positions(fields: ConfigFields, count: int) -> tuple[dict[bool, float], list[bool]]:
    """The bases of the rotary embeddings of layers with local (False) and global (True) attention, and which layers
    have global attention. transformers 5 writes other fields than transformers 4."""
    every = fields.integer("global_attn_every_n_layers", 3)
    is_global = [index % every == 0 for index in range(count)]
    if (types := fields.get("layer_types")) is not None:
        is_global = [window is None for window in read_layer_windows(fields, types, count, 1)]
    thetas = {False: fields.number("local_rope_theta", 10000.0), True: fields.number("global_rope_theta", 160000.0)}
    if (ropes := fields.mapping("rope_parameters")) is not None:
        for kind, key in ((False, "sliding_attention"), (True, "full_attention")):
            if (rope := ropes.mapping(key)) is not None:
                rope.allow_only("rope_type", "default", "no published model scales its positions")
                thetas[kind] = rope.number("rope_theta", thetas[kind])
                rope.reject_undeclared("modernbert architecture")
        ropes.reject_undeclared("modernbert architecture")
    return thetas, is_global


def _read_classifier(fields: ConfigFields, norm: NormSpec) -> ClassifierSpec:
    pooling = fields.choice("classifier_pooling", ("cls", "mean"), "cls")
    fields.allow_only("classifier_activation", "gelu", "no published model has another one")
    fields.allow_only("classifier_bias", False, "no published model has this bias")
    return ClassifierSpec("head.dense", "classifier", "gelu", norm, False, "mean" if pooling == "mean" else "cls")


def _read_encoder(fields: ConfigFields) -> ModelConfig:
    fields.ignore("classifier_pooling", "classifier_activation", "classifier_bias")
    return _read(fields, classifier=False)


def _read_cross_encoder(fields: ConfigFields) -> ModelConfig:
    check_single_score(fields)
    return _read(fields, classifier=True)


MODERNBERT: Final = Architecture(
    name="modernbert",
    hf_readers={
        "ModernBertModel": _read_encoder,
        "ModernBertForMaskedLM": _read_encoder,
        "ModernBertForSequenceClassification": _read_cross_encoder,
    },
    other_prefixes=tuple((part, f"model.{part}") for part in ("embeddings.", "layers.", "final_norm.")),
    unread_prefixes=("decoder.",),
)
