"""Llama, Mistral, Ministral 3, Qwen2, Qwen3, AFM (Arcee), Seed-OSS (ByteDance) and ERNIE 4.5 (Baidu): `LlamaSizes`.

Mistral adds a sliding window, and Ministral 3 queries that are scaled by their position. Qwen2 and Seed-OSS have biases
of q, k and v, and Qwen3 a norm of each query and key head. AFM has the square of ReLU without a gate. ERNIE 4.5 without
experts has the two dimensions of a rotated pair in adjacent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import PAIRED_QUERIES_AND_KEYS, Architecture
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, exact_quotient
from chairlift.models.reading.expert_fields import read_experts
from chairlift.models.reading.gguf_header import POST_NORM_NAMES, GGUFHeader
from chairlift.models.reading.layer_fields import MAX_LAYERS, read_head_dim, read_layer_windows
from chairlift.models.reading.llama_sizes import ExpertSizes, LlamaSizes, NormNames, QKNormKind
from chairlift.models.reading.rope_fields import read_layer_ropes, read_rope, with_query_scale

ExpertsReader = Callable[[ConfigFields, LlamaSizes], ExpertSizes | None]


def no_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Return no windows, for an architecture that has none."""
    fields.allow_only("sliding_window", None, "this architecture has no sliding window")
    return ()


@dataclass(frozen=True)
class LlamaConfigReader:
    """The reader of one model type, in a `config.json` or a GGUF file.

    Attributes:
        name: see ModelConfig.
        windows: (fields, number of layers) -> the sliding window of each layer.
        inner_key, eps_key: the fields with the inner size of the feed-forward network and the epsilon of norms.
        field_names: the names in a `config.json` of fields that readers read by another name.
        required: the only values that fields may have, because transformers computes with them whatever a file says.
        ignored: the fields without an effect.
        defaults, gguf_defaults: the values of fields that a `config.json` or a GGUF file does not contain.
        default_theta: the base of the rotary embedding where the file does not contain it.
        qkv_bias: whether q, k and v have biases, or None to read `attention_bias`.
        output_bias_key: without `qkv_bias`, the field that says whether the output projection has a bias; None if it
            has none.
        norms, qk_norm, activation, gated, fused_projections: see LlamaSizes.
        rotated_share: the share of the dimensions of a head that are rotated, in a `config.json` that does not contain
            it; None if all are, in every file.
        reads_rope: whether the reader reads one rotary embedding; False if each layer has its own, or none has one.
        layer_thetas: the bases of the rotary embeddings of layers with a window and of the others, see
            `read_layer_ropes`; None if they do not differ.
        rotates_windows_only: whether layers without a window have no rotary embedding, if any layer has a window.
        experts: (fields, the sizes without experts) -> the experts of a layer; None for a model without them.
        has_recurrence: whether layers of a GGUF file may have no heads.
        has_latent: whether V has another width than K.
    """

    name: str
    windows: Callable[[ConfigFields, int], Sequence[int | None]] = no_windows
    qkv_bias: bool | None = None
    output_bias_key: str | None = "attention_bias"
    reads_mlp_bias: bool = False
    norms: NormNames = field(default_factory=NormNames)
    qk_norm: QKNormKind | None = None
    activation: str = "silu"
    gated: bool = True
    fused_projections: Collection[str] = ()
    rotated_share: float | None = None
    reads_rope: bool = True
    layer_thetas: tuple[float | None, float] | None = None
    rotates_windows_only: bool = False
    experts: ExpertsReader | None = None
    default_theta: float = 10_000.0
    inner_key: str = "intermediate_size"
    eps_key: str = "rms_norm_eps"
    field_names: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    has_recurrence: bool = False
    has_latent: bool = False

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        return self.read_sizes(fields).declare()

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        """Read the sizes, for readers that change some of them."""
        self._prepare(fields)
        layers, unread = self._read_layers(fields)
        layer_heads = self._read_heads(fields, layers)
        heads = layer_heads[0]
        kv_heads = self._number_of_layers(fields, "num_key_value_heads", heads)
        for each in set(layer_heads):
            exact_quotient(fields, "num_attention_heads", each, "num_key_value_heads", kv_heads)
        head_dim = read_head_dim(fields)
        if not self.has_latent:
            fields.allow_only("attention.value_length", head_dim, "K and V must have the same width")
        qkv_bias, output_bias, mlp_bias = self._biases(fields)
        sizes = LlamaSizes(
            name=self.name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=self._number_of_layers(fields, self.inner_key),
            num_layers=layers,
            num_unread_layers=unread,
            num_heads=heads,
            layer_heads=() if len(set(layer_heads)) == 1 else layer_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            norm_eps=fields.number(self.eps_key, high=1.0),
            norms=self.norms,
            sliding_windows=self.windows(fields, layers),
            activation=self._activation(fields),
            gated=self.gated,
            fused_projections=self.fused_projections,
            rope=self._rope(fields) if self.reads_rope and self.layer_thetas is None else RopeConfig(),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=self.qk_norm,
        )
        if self.layer_thetas is not None:
            sizes = sizes.with_layer_ropes(*read_layer_ropes(fields, *self.layer_thetas))
        if self.rotates_windows_only:
            sizes = sizes.with_layer_ropes(sizes.rope, None)
        return sizes if self.experts is None else replace(sizes, experts=self.experts(fields, sizes))

    def _prepare(self, fields: ConfigFields) -> None:
        """Set names and defaults of fields, and check those that have one value only."""
        if isinstance(fields, GGUFHeader):
            fields.set_defaults(self.gguf_defaults)
            return
        fields.set_names(self.field_names)
        fields.set_defaults(self.defaults)
        for key, value in self.required.items():
            fields.allow_only(key, value, f"{self.name} models are computed with {value}")
        fields.ignore(*self.ignored)

    def _read_layers(self, fields: ConfigFields) -> tuple[int, int]:
        """Return the number of layers, and of those behind them that are not loaded.

        These predict further tokens (MTP); in GGUF files they are part of the number of blocks.
        """
        layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        if not isinstance(fields, GGUFHeader):
            return layers, fields.integer("num_nextn_predict_layers", 0, low=0)
        return layers - fields.integer("num_nextn_predict_layers", 0, low=0, high=layers - 1), 0

    def _read_heads(self, fields: ConfigFields, layers: int) -> Sequence[int]:
        """Read the number of query heads of each layer."""
        return (fields.uniform("num_attention_heads", ignores_zeros=self.has_recurrence),) * layers

    def _number_of_layers(self, fields: ConfigFields, key: str, default: Any = REQUIRED) -> int:
        """Read a number that GGUF files may repeat for each layer."""
        return fields.uniform(key, default, ignores_zeros=self.has_recurrence)

    def _activation(self, fields: ConfigFields) -> str:
        return fields.choice("hidden_act", (self.activation,), self.activation)

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        fields.allow_only("rope_interleaved", False, "the dimensions of a rotated pair must be half a head apart")
        return read_rope(fields, self.default_theta, self.rotated_share)

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        """Return whether q, k and v, the output projection, and the feed-forward network have biases.

        A field that the reference implementation of the model type ignores must be absent or agree with it.
        """
        if isinstance(fields, GGUFHeader):
            qkv_bias = bool(self.qkv_bias) or fields.has_bias("attn_q")
            return qkv_bias, fields.has_bias("attn_output"), fields.has_bias("ffn_up")
        why = f"{self.name} models do not have this option"
        if not self.reads_mlp_bias:
            fields.allow_only("mlp_bias", False, why)
        mlp = fields.flag("mlp_bias", False)
        if self.qkv_bias is None:
            bias = fields.flag("attention_bias", False)
            return bias, self.output_bias_key is not None and fields.flag(self.output_bias_key, False), mlp
        fields.allow_only("attention_bias", self.qkv_bias, why)
        return self.qkv_bias, False, mlp


def uniform_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    """Return the same window for all layers, or None for each if `sliding_window` is absent."""
    fields.allow_only("sliding_window_pattern", None, "all layers must have the same window")
    return (fields.window(),) * layers


def qwen_windows(fields: ConfigFields, layers: int, *, is_paired: bool = False) -> Sequence[int | None]:
    """Read the windows of Qwen2: in the layers from `max_window_layers`, or, if paired, in every second one below."""
    uses_windows = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window") if uses_windows else fields.get("sliding_window")
    fields.ignore("max_window_layers")  # It has no effect without windows.
    types = fields.get("layer_types")
    if types is not None:
        return read_layer_windows(fields, types, layers, window if uses_windows else None)
    if not uses_windows:
        return ()
    first = fields.integer("max_window_layers", low=0)
    local = range(0, first, 2) if is_paired else range(first, layers)
    return tuple(window if layer in local else None for layer in range(layers))


def read_gguf_experts(fields: ConfigFields, sizes: LlamaSizes) -> ExpertSizes | None:
    """Read the experts of a GGUF file of Llama; a file with experts is a Mixtral."""
    return None if fields.get("num_experts", 0) == 0 else read_experts(fields, "chosen", sizes.intermediate_size)


class Ernie45ConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of ERNIE 4.5, which has one field for all biases."""

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        super()._biases(fields)  # Rejects the fields of other models.
        bias = fields.flag("use_bias", False)
        return bias, bias, bias


class Ministral3ConfigReader(LlamaConfigReader):
    """The reader of Ministral 3. GGUF files of Mistral Small 3.1, whose queries are not scaled, have the same name."""

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return with_query_scale(fields, super()._rope(fields))


_MINISTRAL3: Final = Ministral3ConfigReader("ministral3", uniform_windows, qkv_bias=False)
_QWEN2: Final = LlamaConfigReader("qwen2", uniform_windows, qkv_bias=True)
_QWEN3: Final = LlamaConfigReader("qwen3", uniform_windows, qk_norm="heads")
_ARCEE: Final = LlamaConfigReader("arcee", reads_mlp_bias=True, activation="relu2", gated=False)

LLAMA: Final = Architecture(
    name="llama",
    hf_readers={
        "LlamaForCausalLM": LlamaConfigReader("llama", reads_mlp_bias=True),
        "MistralForCausalLM": LlamaConfigReader(
            "mistral", uniform_windows, qkv_bias=False, defaults={"sliding_window": 4096}
        ),
        "Qwen2ForCausalLM": replace(_QWEN2, windows=qwen_windows),
        "Qwen3ForCausalLM": replace(_QWEN3, windows=qwen_windows),
        "ArceeForCausalLM": _ARCEE,
    },
    gguf_readers={
        "llama": LlamaConfigReader("llama", uniform_windows, experts=read_gguf_experts),
        "exaone": LlamaConfigReader("exaone", uniform_windows),
        **dict.fromkeys(("qwen2", "qwen2vl"), _QWEN2),
        **dict.fromkeys(("qwen3", "qwen3vl"), _QWEN3),
        "arcee": _ARCEE,
    },
    gguf_interleaved=frozenset(("llama", "arcee")),
)
MINISTRAL3: Final = Architecture(
    name="ministral3",
    hf_readers={"Ministral3ForCausalLM": _MINISTRAL3},
    gguf_readers={"mistral3": _MINISTRAL3},
    gguf_interleaved=frozenset(("mistral3",)),
)
SEED_OSS: Final = Architecture(
    name="seed_oss",
    hf_readers={
        "SeedOssForCausalLM": LlamaConfigReader(
            "seed_oss",
            output_bias_key="attention_out_bias",
            reads_mlp_bias=True,
            defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        )
    },
    gguf_readers={"seed_oss": LlamaConfigReader("seed_oss", uniform_windows)},
    gguf_names=POST_NORM_NAMES,
)
ERNIE45: Final = Architecture(
    name="ernie4_5",
    hf_readers={
        "Ernie4_5ForCausalLM": Ernie45ConfigReader(
            "ernie4_5",
            qkv_bias=False,
            default_theta=500_000.0,
            defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        )
    },
    gguf_readers={"ernie4_5": LlamaConfigReader("ernie4_5", uniform_windows)},
    gguf_interleaved=frozenset(("ernie4_5",)),
    stacked_names=PAIRED_QUERIES_AND_KEYS,
)
