"""ERNIE 4.5 without experts (Baidu, 2025): Llama with the two dimensions of a rotated pair in adjacent rows."""

from __future__ import annotations

from typing import Final

from chairlift.models.architectures.llama import LlamaConfigReader, no_windows, uniform_windows
from chairlift.models.reading.architecture import Architecture, StoredName
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUF_NAMES


class Ernie45ConfigReader(LlamaConfigReader):
    """The reader of the `config.json` of ERNIE 4.5, which has one field for all biases."""

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        super()._biases(fields)  # Rejects the fields of other models.
        bias = fields.flag("use_bias", False)
        return bias, bias, bias


READER: Final = Ernie45ConfigReader(
    "ernie4_5",
    no_windows,
    qkv_bias=False,
    default_theta=500_000.0,
    defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
)

ERNIE45: Final = Architecture(
    name="ernie4_5",
    hf_readers={"Ernie4_5ForCausalLM": READER},
    gguf_readers={"ernie4_5": LlamaConfigReader("ernie4_5", uniform_windows)},
    gguf_names=GGUF_NAMES,
    gguf_interleaved=frozenset(("ernie4_5",)),
    stacked_names={
        name: StoredName(name, block="pair")
        for name in ("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj")
    },
)
