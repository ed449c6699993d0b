"""GGUFHeader: the metadata of a GGUF file, under the names that its fields have in a `config.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from chairlift.models.reading.config_fields import REQUIRED, ConfigFields

SHARED_EXPERT: Final = {f"{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
"""Name of a matrix of a shared expert -> GGUF's."""


def names_in_layers(module: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return entries of Architecture.gguf_names from the names in a module of each layer, and those in GGUF."""
    return {f"model.layers.{{}}.{module}.{name}": f"blk.{{}}.{other}" for name, other in names.items()}


GGUF_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.qkv_proj": "blk.{}.attn_qkv",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.gate_proj": "blk.{}.attn_gate",
    "model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
    "model.layers.{}.pre_mlp_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_mlp_layernorm": "blk.{}.post_ffw_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.gate_up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    "model.layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
    "model.layers.{}.mlp.experts.{}.gate_proj": "blk.{}.ffn_gate_exps",
    "model.layers.{}.mlp.experts.{}.up_proj": "blk.{}.ffn_up_exps",
    "model.layers.{}.mlp.experts.{}.gate_up_proj": "blk.{}.ffn_gate_up_exps",
    "model.layers.{}.mlp.experts.{}.down_proj": "blk.{}.ffn_down_exps",
    "model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    "model.layers.{}.mlp.shared_expert_gate": "blk.{}.ffn_gate_inp_shexp",
    **names_in_layers("mlp.shared_expert", SHARED_EXPERT),
    **names_in_layers("mlp.shared_experts", SHARED_EXPERT),
    "model.norm": "output_norm",
    "lm_head": "output",
}
"""The `gguf_names` of an architecture that does not have its own."""

POST_NORM_NAMES: Final = {**GGUF_NAMES, "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm"}
"""The same of files with norms after attention, or with this name of the norm before the network."""

CONFIG_KEYS: Final = {
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_attention_heads_per_layer": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "prefix_dense_intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "partial_rotary_factor": "rope.dimension_count",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "moe_layer_interval": "interleave_moe_layer_step",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_dense_layers": "leading_dense_block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "output_multiplier": "logit_scale",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "conv_L_cache": "shortconv.l_cache",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
"""The name of a field in a `config.json` -> the key of GGUF metadata after the name of the architecture."""

FILE_KEYS: Final = frozenset(
    (
        *CONFIG_KEYS,
        *CONFIG_KEYS.values(),
        "attn_logit_softcapping",
        "embedding_length_per_layer_input",
        "expert_gating_func",
        "final_logit_softcapping",
        "full_attention_interval",
        "moe_latent_size",
        "vocab_size",
    )
)
"""The names without a dot that are looked up in a GGUF file."""


class GGUFHeader(ConfigFields):
    """The metadata of a GGUF file whose keys begin with the name of its architecture.

    A field is read by its name in a `config.json` (CONFIG_KEYS) or by its key. What only the tensors show, such as
    biases and tied embeddings, is there as well, and no key of the file changes it.

    Attributes:
        name: the value of `general.architecture`.
        tensor_names: the names of all tensors in the file, or their shapes by name.
        rope_factors: the factors of rotary embeddings in the file, by the name of the tensor (`rope_freqs.weight`).
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        source: str,
        name: str,
        tensor_names: Collection[str],
        rope_factors: Mapping[str, Sequence[float]],
    ) -> None:
        super().__init__(metadata, source, f"{name}.")
        self.name = name
        self.tensor_names = tensor_names
        self.rope_factors = rope_factors
        tokens = metadata.get("tokenizer.ggml.tokens")
        self.set_defaults(
            {
                "vocab_size": len(tokens) if isinstance(tokens, list) and tokens else None,
                "intermediate_size": metadata.get(f"{name}.expert_feed_forward_length"),
                "tie_word_embeddings": bool(tensor_names) and "output.weight" not in tensor_names,
                "norm_topk_prob": True,
                "rope_theta": 10_000.0,
                # The keys of xIELU have no name of an architecture.
                **{key: value for key, value in metadata.items() if key.startswith("xielu.")},
            }
        )

    def name_of(self, key: str) -> str:
        return CONFIG_KEYS.get(key, key)

    def _stored(self, key: str) -> Any:
        """Return the value in the file; None for a name of `config.json` that GGUF files do not have."""
        return super()._stored(key) if "." in key or key in FILE_KEYS else None

    def window(self, default: Any = None) -> int | None:
        """Read the window; without one it is missing or 0, which is an error where a window is required."""
        is_required = default is REQUIRED
        return self.integer("sliding_window", REQUIRED if is_required else 0, low=int(is_required)) or None

    def has_bias(self, module: str) -> bool:
        """Whether a module of the first layer has a bias."""
        return f"blk.0.{module}.bias" in self.tensor_names

    def num_rows(self, name: str) -> int | None:
        """The number of rows of a tensor, or None without its shape."""
        shapes = self.tensor_names if isinstance(self.tensor_names, Mapping) else {}
        return shapes[name][0] if name in shapes else None

    def layers_without_kv(self, layers: int) -> list[bool]:
        """Read whether each layer has no KV heads, and so recurrent state."""
        key = "num_key_value_heads"
        heads = self.get(key)
        if not isinstance(heads, list) or len(heads) != layers:
            raise self.error(key, f"must hold the number of KV heads of each of {layers} layers, got {heads!r:.80}")
        return [count == 0 for count in heads]
