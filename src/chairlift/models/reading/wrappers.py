"""WRAPPERS: the classes of models that hold a text model beside encoders of images, video or audio.

Only the text model is served. An object of the `config.json` has its fields and names its architecture, and its
parameters have the names of this architecture with another beginning. Wrappers compute text as the architecture does:
the axes of a multi-axis position (`mrope_section`) are equal for text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from chairlift.models.reading.config_fields import ConfigFields

SHARED_FIELDS: Final = ("bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype")
"""Fields of the whole model that precede those of the text model."""

TIE_FIELDS: Final = ("tie_word_embeddings", "tie_embedding")
ENCODER_FIELD: Final = re.compile("audio|image|video|vision")
"""The beginning of the names of fields of encoders, which some files have beside those of the text model."""

BARE_MODEL: Final = re.compile("Model$")
"""The end of the names of wrappers without LM head."""

_LLAMA: Final[dict[str, Any]] = {
    **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6},
}
_ENDS: Final = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN: Final = {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA | _ENDS,
    "mistral": _LLAMA
    | _ENDS
    | {"intermediate_size": 14_336, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
    | {"sliding_window": 4096},
    "qwen2": _LLAMA | _QWEN | {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096},
    **{f"{kind}_text": {"rope_theta": 1e6} for kind in ("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl")},
    "qwen3_vl_moe_text": {"norm_topk_prob": True, "rope_theta": 5e5},
    "qwen3_vl_text": {"rope_theta": 5e5},
}
"""`model_type` of a text model -> the values that transformers leaves out of its object in a `config.json`."""

SAME_TYPES: Final = {
    "exaone4_5_text": "exaone4",
    "granite4_vision_text": "granite",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""`model_type` of a text model that only wrappers have -> the one that computes the same."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A class of models that hold a text model: an entry of `architectures` in a `config.json`.

    Attributes:
        text: the `model_type` of the text model in files that do not contain it.
        inputs: what the encoders read, for messages.
        module: the name of the text model, with which the names of its parameters begin.
        encoders: the beginnings of the names of parameters that have no part in text.
        config: the names of the objects around the fields of the text model, the outermost first.
        layers: the name of the layers of the text model.
    """

    text: str
    inputs: str = "images"
    module: str = "language_model"
    encoders: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    config: tuple[str, ...] = ("text_config",)
    layers: str = "layers"

    @property
    def prefixes(self) -> tuple[tuple[str, str], ...]:
        """(declared prefix, prefix in its place), as transformers 5 and 4 and AutoModel write them."""
        modules = f"model.{self.module}.", f"{self.module}.model.", f"{self.module}."
        layers = (("model.layers.", f"{prefix}{self.layers}.") for prefix in modules if self.layers != "layers")
        return *(("model.", prefix) for prefix in modules), *layers, ("lm_head.", f"{self.module}.lm_head.")

    @property
    def unread(self) -> tuple[str, ...]:
        """The beginnings of the names of parameters that are not read."""
        return tuple(f"{model}{name}" for model in ("", "model.") for name in self.encoders)

    def text_fields(self, config: Mapping[str, Any], source: str) -> ConfigFields:
        """Return the fields of the text model in a `config.json`, with those of the whole model that apply to it.

        Raises:
            ModelLoadError: the object with the fields is missing or no object.
        """
        text, prefix = config, ""
        for key in self.config:
            inner = ConfigFields(text, source).mapping(key)
            if inner is None and "hidden_size" not in text:
                raise ConfigFields(text, source).error(f"{prefix}{key}", "is missing; the file is incomplete")
            if inner is not None:
                text, prefix = text[key], f"{prefix}{key}."
        objects = [ConfigFields(each, source) for each in (config, text)]
        ties = [each.flag(key) for each in objects for key in TIE_FIELDS if each.get(key) is not None]
        kind = self.text if text is config else text.get("model_type") or self.text
        values = {
            **{key: value for key, value in text.items() if ENCODER_FIELD.match(key) is None},
            **{key: config[key] for key in SHARED_FIELDS if config.get(key) is not None},
            **dict.fromkeys(TIE_FIELDS),
            "tie_word_embeddings": any(ties) if ties else None,
            "model_type": SAME_TYPES.get(kind, kind),
        }
        fields = ConfigFields({f"{prefix}{key}": value for key, value in values.items()}, source, prefix)
        fields.set_defaults(DEFAULTS.get(kind, {}))
        return fields


_VISUAL: Final = ("visual.",)
_CONNECTED: Final = ("vision_model.", "connector.")
_KIMI: Final = Wrapper("deepseek_v3", "images and video", encoders=("vision_tower.", "mm_projector."), layers="blocks")
_GEMMA4: Final = ("vision_tower.", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio.")
_GRANITE: Final = ("vision_tower.", "image_newline", "layerwise_projectors.", "spatial_projectors.")
_NEWLINE: Final = ("vision_tower.", "multi_modal_projector.", "image_newline")
_GLIMMER: Final = ("vision_tower.", "vision_adapter.", "vision_projection.")
_OMNI: Final = ("visual.", "audio_tower.")
_THINKER: Final = ("thinker.visual.", "thinker.audio_tower.", "talker.", "token2wav.")

WRAPPERS: Final[Mapping[str, Wrapper]] = {
    "Cohere2VisionForConditionalGeneration": Wrapper("cohere2"),
    "Exaone4_5_ForConditionalGeneration": Wrapper("exaone4", "images and video", encoders=("visual.", "mtp.")),
    "Gemma3ForConditionalGeneration": Wrapper("gemma3_text"),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4_text", "images and audio", encoders=_GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": Wrapper("gemma4_unified_text", "images and audio", encoders=_GEMMA4),
    "Granite4VisionForConditionalGeneration": Wrapper("granite", encoders=_GRANITE),
    "Idefics3ForConditionalGeneration": Wrapper("llama", module="text_model", encoders=_CONNECTED),
    "InternVLChatModel": Wrapper("qwen2", config=("llm_config",), encoders=("vision_model.", "mlp1.")),
    "InternVLForConditionalGeneration": Wrapper("qwen2"),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "Lfm2VlForConditionalGeneration": Wrapper("lfm2"),
    "Lfm3VlForConditionalGeneration": Wrapper("lfm3", "images and video"),
    "LlavaForConditionalGeneration": Wrapper("llama"),
    "LlavaNextForConditionalGeneration": Wrapper("llama", encoders=_NEWLINE),
    "LlavaOnevisionForConditionalGeneration": Wrapper("qwen2", "images and video", encoders=_NEWLINE),
    "Mistral3ForConditionalGeneration": Wrapper("mistral"),
    "MuseGlimmerForConditionalGeneration": Wrapper("muse_glimmer_text", "images and video", encoders=_GLIMMER),
    "Qwen2VLForConditionalGeneration": Wrapper("qwen2", "images and video", encoders=_VISUAL),
    "Qwen2_5OmniForConditionalGeneration": Wrapper(
        "qwen2", "images, video and audio", "thinker", _THINKER, ("thinker_config", "text_config")
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": Wrapper("qwen2", "images, video and audio", encoders=_OMNI),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2", "images and video", encoders=_VISUAL),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3", "images and video", encoders=_VISUAL),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl_moe_text", "images and video", encoders=_VISUAL),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5", "images and video", encoders=_VISUAL),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe", "images and video", encoders=_VISUAL),
    "SmolVLMForConditionalGeneration": Wrapper("llama", "images and video", module="text_model", encoders=_CONNECTED),
    "VoxtralForConditionalGeneration": Wrapper("llama", "audio", encoders=("audio_tower.", "multi_modal_projector.")),
}
TEXT_PREFIXES: Final = tuple(dict.fromkeys(pair for wrapper in WRAPPERS.values() for pair in wrapper.prefixes))
"""(declared prefix, prefix in its place) of all wrappers. Adapters of a GGUF file have them too."""

ENCODER_PREFIXES: Final = tuple(
    dict.fromkeys(each for wrapper in WRAPPERS.values() for each in wrapper.unread if not each.endswith("mtp."))
)


def find_wrapper(names: Any) -> str | None:
    """Return the first entry of `architectures` that is a wrapper, with an LM head or without; None without one."""
    for name in names if isinstance(names, list) else [names]:
        for form in (name, BARE_MODEL.sub("ForConditionalGeneration", name)) if isinstance(name, str) else ():
            if form in WRAPPERS:
                return form
    return None
