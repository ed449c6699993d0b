"""The text models of models with images, video or audio, in the folders that transformers writes."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_gguf_parity import load
from test_models_parity import KERNEL_SETS, assert_close, prompts, run, tolerance

from chairlift.engine.startup.weight_plan import plan_weights
from chairlift.errors import ModelLoadError
from chairlift.kernels.torch_set import TorchMemory
from chairlift.loading.lora_adapter import read_lora_adapter
from chairlift.loading.resolve import resolve_model
from chairlift.models.decoder import build_model
from chairlift.models.reading.wrappers import WRAPPERS
from chairlift.models.registry import get_architecture, read_hf_config
from support.packed_steps import Tables
from support.quantized_checkpoints import METHODS, write_checkpoint
from support.tiny_models import TINY_COMMON, TINY_MODELS, randomize

TORCH: Final = TorchMemory("float32", "cpu")
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
        factor, soft_cap: the factor and the soft cap of logits that the wrapper of transformers leaves out.
    """

    arch: str
    encoders: dict[str, Any]
    kind: str = ""
    text: dict[str, Any] | None = None
    factor: float = 1.0
    soft_cap: float = math.inf

    def logits(self, found: torch.Tensor) -> torch.Tensor:
        """The logits of the text model for those of the wrapper."""
        found = found * self.factor
        return found if self.soft_cap == math.inf else self.soft_cap * torch.tanh(found / self.soft_cap)


CASES: Final = {
    "Cohere2Vision": Case("cohere2", {**SIGLIP, "alignment_intermediate_size": 16}, factor=0.0625),
    "Exaone4_5_": Case("exaone4", {"vision_config": {**QWEN, "patch_size": 4, "num_key_value_heads": 1}}),
    "Gemma3": Case("gemma3", {**SIGLIP, "mm_tokens_per_image": 4}, soft_cap=7.0),
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
    "Lfm3Vl": Case(
        "lfm3", {"vision_config": {**HEADS, "num_key_value_heads": 1, "patch_size": 4}, "projector_hidden_size": 16}
    ),
    "Llava": Case("qwen2", CLIP, text={"tie_word_embeddings": True}),
    "LlavaNext": Case("mistral", CLIP),
    "LlavaOnevision": Case("qwen2", SIGLIP),
    "Mistral3": Case(
        "ministral3", {"vision_config": {"model_type": "pixtral", **IMAGE, "head_dim": 8}, "tie_word_embeddings": False}
    ),
    "Mistral3 of Mistral Small 4": Case(
        "mistral4", {"vision_config": {"model_type": "pixtral", **IMAGE, "head_dim": 8}, "tie_word_embeddings": False}
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


def make_wrapper(name: str, changes: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    case = CASES[name]
    family, extra = TINY_MODELS[case.arch]
    wrapper = getattr(transformers, f"{name.partition(' ')[0]}ForConditionalGeneration")
    own = getattr(transformers, f"{family}ForCausalLM").config_class
    text = {**TINY_COMMON, **extra, "model_type": case.kind or own.model_type, **(case.text or {}), **(changes or {})}
    model = wrapper(wrapper.config_class(text_config=text, **case.encoders)).to(torch.float32).eval()
    randomize(model)
    return model


def names_in(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", CASES)
def test_the_text_model_of_a_wrapper_gives_its_logits(name: str, tmp_path: Path) -> None:
    """A folder has the names of the published files, which transformers writes, or those of its modules."""
    model, folders = make_wrapper(name), [tmp_path / "original", tmp_path / "modules"]
    for folder in folders:
        model.save_pretrained(folder, save_original_format=folder.name == "original")
    if names_in(folders[0]) == names_in(folders[1]):
        del folders[1]
    if name == "Qwen3VLMoe":
        folders.append(with_transposed_experts(folders[0], tmp_path / "published"))
    with torch.inference_mode():
        expected = {
            sequence: CASES[name].logits(model(torch.tensor([tokens])).logits[0])
            for sequence, tokens in prompts().items()
        }
        for folder in folders:
            for kernels in KERNEL_SETS:
                check_logits(folder, kernels, expected)


def with_transposed_experts(source: Path, folder: Path) -> Path:
    """A copy with the experts of published files, which transformers 5 does not restore: [experts, in, out]."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    stacked = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
    assert len(stacked) == 4
    save_file(tensors | stacked, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    make_wrapper("LlavaNext").save_pretrained(folder)
    return folder


def changed(source: Path, folder: Path, text: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A copy of the folder with other fields of the text model and of the whole model."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"text_config": {**config["text_config"], **(text or {})}, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_encoders_are_skipped_and_named(llava: Path, tiny_model_dir: Callable[..., Path]) -> None:
    source = resolve_model(str(llava))
    config = source.config()
    weights = source.weights(config, torch.float32, torch.device("cpu"))
    build_model(config, weights, dtype=torch.float32, device="cpu", kernels="torch")
    notes = weights.notes()
    assert "skipped 4 tensors multi_modal_projector.*, which the text model does not use" in notes
    assert "only the text model of LlavaNextForConditionalGeneration is served: images are not read" in notes
    text = resolve_model(str(tiny_model_dir("mistral")))
    first, second = (plan_weights(each.config(), TORCH, each.formats(each.config())) for each in (source, text))
    assert first == second


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (None, None)])
def test_an_lm_head_of_its_own_is_read(outer: bool | None, inner: bool | None, llava: Path, tmp_path: Path) -> None:
    """transformers 5 ties the LM head unless the file has one with other values."""
    folder = changed(llava, tmp_path / "x", {"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    assert not resolve_model(str(folder)).config().tie_word_embeddings
    tensors = load_file(folder / "model.safetensors")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert resolve_model(str(folder)).config().tie_word_embeddings == bool(outer or inner)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert resolve_model(str(folder)).config().tie_word_embeddings == bool(outer or inner)


@pytest.mark.parametrize("method", ["w4a16", "gptq", "fp8"])
def test_quantized_wrappers_have_names_of_either_form(method: str, tmp_path: Path) -> None:
    """Lists of modules have the names of the version of transformers that quantized them."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    make_wrapper("LlavaNext", wide).save_pretrained(tmp_path / "plain")
    towers = [name.removesuffix(".weight") for name in names_in(tmp_path / "plain") if "language_model" not in name]
    values = write_checkpoint(tmp_path / "plain", tmp_path / "quantized", METHODS[method], towers)
    path = tmp_path / "quantized" / "config.json"
    config = json.loads(path.read_text())
    if method == "w4a16":
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["targets"] = [r"re:model\.language_model\.layers.*_proj$"]
    path.write_text(json.dumps(config))
    source = resolve_model(str(tmp_path / "quantized"))
    declared = source.config()
    weights = source.weights(declared, torch.float32, torch.device("cpu"))
    for name in ("layers.0.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight"):
        expected = values[f"language_model.model.{name}"]
        found = weights.tensor(f"model.{name}", tuple(expected.shape))
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        assert source.formats(declared)(f"model.{name}") == {"w4a16": "q4_0", "gptq": "q4_0", "fp8": "f8_e4m3"}[method]


@pytest.mark.parametrize("name", ["LlavaNext", "Qwen3VL", "Idefics3"])
def test_adapters_of_a_wrapper(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters with `all-linear` have matrices of the encoder, which are skipped."""
    model = make_wrapper(name)
    model.save_pretrained(tmp_path / "model")
    config = resolve_model(str(tmp_path / "model")).config()
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    with caplog.at_level(logging.INFO, "chairlift"):
        matrices = read_lora_adapter(str(tmp_path / "adapter"), config, 8)
    names = (f"self_attn.{part}_proj" for part in "qkvo")
    modules = {*names, *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))}
    assert set(matrices) == {f"model.layers.{layer}.{module}" for layer in (0, 1) for module in modules}
    assert any("modules of encoders, such as model." in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "config.json: text_config is missing; the file is incomplete"),
        ({"text_config": 5}, "config.json: text_config must be an object, got 5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"text_config": {"model_type": "phi"}}, r"text_config\.model_type is 'phi', which is not supported"),
        ({"text_config": {"model_type": "llama", "rope_parameters": {"rope_type": "ntk"}}}, r"text_config\.rope_param"),
        (
            {"text_config": {"model_type": "llama", "is_causal": False}},
            r"text_config\.is_causal is False.*must be causal",
        ),
        (
            {"text_config": {"model_type": "llama", "num_experts": 4}},
            r"text_config\.num_experts is 4, and the llama arch",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    assert read_hf_config({**config, "projector_hidden_act": "x"}, source="config.json").num_layers == 32
    with pytest.raises(ModelLoadError, match=message):
        read_hf_config({**config, **changes}, source="config.json")


def test_wrappers_of_remote_code_and_without_lm_head() -> None:
    text = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128}
    text |= {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    thinker = {"thinker_config": {"text_config": {**text, "model_type": "qwen2_5_omni_text"}}}
    for name, fields in {
        "InternVLChatModel": {"llm_config": text},
        "InternVLModel": {"text_config": text},
        "Qwen2_5OmniModel": thinker,
    }.items():
        config = read_hf_config({"architectures": [name], **fields}, source="config.json")
        assert (config.name, config.num_layers) == ("qwen2" if fields is thinker else "qwen3", 2)
    places = get_architecture(config).hf_names("model.layers.1.mlp.up_proj.weight")
    assert "thinker.model.layers.1.mlp.up_proj.weight" in [place.name for place in places]


def test_every_wrapper_of_transformers_has_a_case() -> None:
    """The text models of the others are in other tests, or those of their remote code."""
    names = {name.removesuffix("ForConditionalGeneration") for name in WRAPPERS}
    others = {"MuseGlimmer", "Gemma4", "Gemma4Unified", "InternVLChatModel", "KimiK25", "Qwen2_5Omni"}
    assert names - others == {name.partition(" ")[0] for name in CASES}


def check_logits(folder: Path, kernels: str, expected: dict[int, torch.Tensor]) -> None:
    model = load(folder, kernels)
    model.allocate_kv_cache(num_blocks=64, block_size=8)
    found = run(model, Tables(64, 8), [(sequence, 0, len(prompt)) for sequence, prompt in prompts().items()])
    for sequence, logits in expected.items():
        assert_close(found[sequence], logits, tolerance(folder))
