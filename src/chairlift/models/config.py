"""ModelConfig: what a model is, in our words. The only reader of HF `config.json` and of GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how it is stretched.

    `scaling` is "none", "linear" (factor), "llama3" (factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings), or "factors" (freq_factors).

    Attributes:
        freq_factors: head_dim / 2 numbers; inverse frequency i is divided by entry i. GGUF files carry the llama3
            scaling that way (tensor `rope_freqs.weight`).
    """

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    freq_factors: tuple[float, ...] = ()


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
        dtype: of the file's tensors ("float32", "float16", "bfloat16"); "float16" if they are quantized.
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

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, source: str, generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read a Hugging Face `config.json` (and `generation_config.json`, for its end-of-sequence tokens).

        Args:
            config, generation_config: the parsed files.
            source: the file's name, for error messages.

        Raises:
            ModelLoadError: a key is missing, wrong in type, absurd or not supported; names the file, key and value.
        """
        from chairlift.models.config_hf import read_hf

        return read_hf(config, source, generation_config or {})

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        source: str,
        tensor_names: Collection[str] = (),
        rope_freqs: Sequence[float] | None = None,
    ) -> ModelConfig:
        """Read the metadata of a GGUF file.

        Args:
            metadata: key -> int, float, bool, str or list of them.
            source: the file's name, for error messages.
            tensor_names: of the file's tensors. They alone tell which biases there are and whether the embeddings
                are tied (no `output.weight`).
            rope_freqs: the tensor `rope_freqs.weight`, if there is one.

        Raises:
            ModelLoadError: as from_hf.
        """
        from chairlift.models.config_gguf import read_gguf

        return read_gguf(metadata, source, tensor_names, rope_freqs)
