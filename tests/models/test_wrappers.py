"""The text models of models with images, video or audio, in the folders that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import transformers
from safetensors import safe_open
from test_gguf_parity import load
from test_models_parity import KERNEL_SETS, assert_close, prompts, run, tolerance

from conftest import _randomize
from support.packed_steps import Tables
from support.tiny_models import TINY_COMMON, TINY_MODELS

SIZES: Final[dict[str, Any]] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS: Final = {**SIZES, "num_attention_heads": 2}
IMAGE: Final = {**HEADS, "image_size": 28, "patch_size": 14}
CLIP: Final = {"vision_config": {"model_type": "clip_vision_model", **IMAGE, "projection_dim": 16}}
SIGLIP: Final = {"vision_config": {"model_type": "siglip_vision_model", **IMAGE}}
PLAIN: Final = {"vision_config": IMAGE}
QWEN: Final = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
QWEN2: Final = {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4}}
QWEN25: Final = {"vision_config": {**QWEN, "patch_size": 4}}
QWEN3: Final = {
    "vision_config": {**QWEN, "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
}
WHISPER: Final = {**HEADS, "vocab_size": 8, "num_mel_bins": 4, "max_source_positions": 8}
QFORMER: Final = {
    **{"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 16},
    **{"cross_attention_frequency": 1, "max_position_embeddings": 16, "use_qformer_text_input": False},
}


def sections(**others: Any) -> dict[str, Any]:
    """Fields of a text model with multi-axis positions."""
    rope = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [4, 2, 2], **others}
    return {"head_dim": 16, "rope_parameters": rope}


class Case(NamedTuple):
    """A wrapper that transformers writes.

    Attributes:
        arch: the key of TINY_MODELS of the text model.
        encoders: the further fields of the configuration.
        kind: the `model_type` of the text model in the wrapper, where it differs from that of its own class.
        text: changed fields of the text model.
        factor: the factor of logits that the wrapper of transformers leaves out.
    """

    arch: str
    encoders: dict[str, Any]
    kind: str = ""
    text: dict[str, Any] | None = None
    factor: float = 1.0


CASES: Final = {
    "Cohere2Vision": Case("cohere2", {**SIGLIP, "alignment_intermediate_size": 16}, factor=0.0625),
    "Exaone4_5_": Case("exaone4", {"vision_config": {**QWEN, "patch_size": 4, "num_key_value_heads": 1}}),
    "Gemma3": Case("gemma3", {**SIGLIP, "mm_tokens_per_image": 4}, text={"final_logit_softcapping": None}),
    "Granite4Vision": Case(
        "granite",
        {
            "vision_config": {**CLIP["vision_config"], "hidden_size": 64},
            "qformer_config": QFORMER,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0]],
        },
        "granite4_vision_text",
    ),
    "Idefics3": Case("llama", PLAIN),
    "InternVL": Case(
        "gpt_oss", {"vision_config": {**HEADS, "image_size": [28, 28]}}, text={"tie_word_embeddings": True}
    ),
    "Kimi_K25": Case(
        "deepseek_v3",
        {
            "vision_config": {**HEADS, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
        },
    ),
    "Lfm2Vl": Case(
        "lfm2",
        {
            "vision_config": {"model_type": "siglip2_vision_model", **HEADS, "num_patches": 4, "patch_size": 4},
            "projector_hidden_size": 16,
        },
    ),
    "Llava": Case("qwen2", CLIP, text={"tie_word_embeddings": True}),
    "LlavaNext": Case("mistral", CLIP),
    "LlavaOnevision": Case("qwen2", SIGLIP),
    "Mistral3": Case(
        "ministral3", {"vision_config": {"model_type": "pixtral", **IMAGE, "head_dim": 8}, "tie_word_embeddings": False}
    ),
    "Qwen2VL": Case("qwen2", QWEN2, "qwen2_vl_text", sections()),
    "Qwen2_5OmniThinker": Case(
        "qwen2",
        {**QWEN25, "audio_config": {**WHISPER, "d_model": 16, "output_dim": 64}},
        "qwen2_5_omni_text",
        sections(),
    ),
    "Qwen2_5_VL": Case("qwen2", QWEN25, "qwen2_5_vl_text", sections()),
    "Qwen3VL": Case("qwen3", QWEN3, "qwen3_vl_text", sections(mrope_interleaved=True)),
    "Qwen3VLMoe": Case("qwen3_moe", QWEN3, "qwen3_vl_moe_text", sections(mrope_interleaved=True)),
    "Qwen3_5": Case("qwen3_5", QWEN3),
    "Qwen3_5Moe": Case("qwen3_5_moe", QWEN3),
    "SmolVLM": Case("llama", PLAIN),
    "Voxtral": Case("llama", {"audio_config": {"model_type": "voxtral_encoder", **WHISPER, "intermediate_size": 64}}),
}


def make_wrapper(name: str) -> transformers.PreTrainedModel:
    case = CASES[name]
    family, extra = TINY_MODELS[case.arch]
    wrapper = getattr(transformers, f"{name}ForConditionalGeneration")
    own = getattr(transformers, f"{family}ForCausalLM").config_class
    text = {**TINY_COMMON, **extra, "model_type": case.kind or own.model_type, **(case.text or {})}
    model = wrapper(wrapper.config_class(text_config=text, **case.encoders)).to(torch.float32).eval()
    _randomize(model)
    return model


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", CASES)
def test_the_text_model_of_a_wrapper_gives_its_logits(name: str, tmp_path: Path) -> None:
    """A folder has the names of the published files, which transformers writes, or those of its modules."""
    model, folders = make_wrapper(name), [tmp_path / "original", tmp_path / "modules"]
    for folder in folders:
        model.save_pretrained(folder, save_original_format=folder.name == "original")
    if names_in(folders[0]) == names_in(folders[1]):
        del folders[1]
    with torch.inference_mode():
        expected = {
            sequence: model(torch.tensor([tokens])).logits[0] * CASES[name].factor
            for sequence, tokens in prompts().items()
        }
        for folder in folders:
            for kernels in KERNEL_SETS:
                check_logits(folder, kernels, expected)


def check_logits(folder: Path, kernels: str, expected: dict[int, torch.Tensor]) -> None:
    model = load(folder, kernels)
    model.allocate_kv_cache(num_blocks=64, block_size=8)
    found = run(model, Tables(64, 8), [(sequence, 0, len(prompt)) for sequence, prompt in prompts().items()])
    for sequence, logits in expected.items():
        assert_close(found[sequence], logits, tolerance(folder))
