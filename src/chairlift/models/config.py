"""ModelConfig: what a model is, in our words. The only reader of HF `config.json` and of GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how it is stretched.

    `scaling` is "none", "linear" (factor), or "llama3" (factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings).
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only text model.

    Attributes:
        architecture: key of the model registry ("llama", "opt").
        name: the model type as the file says it ("llama", "mistral", "qwen2", "qwen3", "opt").
        sliding_windows: one entry a layer; None attends to everything.
        attention_bias: on the q, k and v projections; attention_output_bias: on the o projection.
        qk_norm: RMSNorm over each head of q and k (Qwen3).
        word_embed_proj_dim, norm_before, final_norm: OPT only.
        eos_token_ids: every token that ends a sequence, generation_config.json's included.
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    sliding_windows: tuple[int | None, ...]
    activation: str = "silu"
    rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    word_embed_proj_dim: int | None = None
    norm_before: bool = True
    final_norm: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def kv_values_per_token(self) -> int:
        """K and V values that one token keeps, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
