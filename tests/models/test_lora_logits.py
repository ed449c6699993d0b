"""Logits with LoRA adapters equal those of transformers with the adapters merged by PEFT, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_gguf_parity import OVERRIDES, write_gguf

from chairlift.kernels.cpu import load as load_native
from chairlift.loading.lora_adapter import read_lora_adapter
from chairlift.loading.resolve import resolve_model
from chairlift.models.decoder import DecoderModel, build_model
from support.case_loop import loop_over
from support.lora_adapters import SIZE, VARIANTS, merged_model, write_adapter
from support.native import needs_native, unavailable_reason
from support.packed_steps import Tables, pack
from support.recurrences import state_step
from support.tiny_models import EVERY_ARCHITECTURE, TINY_MODELS

KERNEL_SETS = ("torch",) if unavailable_reason() else ("torch", "native")
WITH_REFERENCE = [*TINY_MODELS] if EVERY_ARCHITECTURE else ["llama", "mixtral", "qwen3_5"]
"""Models that the reference kernels compute too: one with experts, and one with recurrent layers."""

# Modules that are merged in other ways, other activations and norms, biases, reordered rows, and dense networks beside
# experts.
MODELS: dict[str, list[str] | str] = {
    "llama": "all-linear",
    "qwen2": "all-linear",
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gemma3": "all-linear",
    "gemma4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "olmo2": "all-linear",
    "mixtral": ["q_proj", "o_proj"],
    "ernie4_5": ["q_proj", "k_proj"],
    "deepseek_v3": ["q_a_proj", "o_proj"],
    "kimi_linear": ["f_a_proj", "f_b_proj", "g_b_proj", "b_proj", "v_proj", "o_proj", "up_proj"],
    "lfm2": "all-linear",
    "lfm2_moe": "all-linear",
    "qwen3_5": "all-linear",
    "qwen3_5_moe": "all-linear",
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"],
    "olmo_hybrid": "all-linear",
    "granite4_h": "all-linear",
    "granite4_h_moe": "all-linear",
    "falcon_h1": ["in_proj", "q_proj", "gate_proj", "down_proj"],
    "nemotron_h": ["in_proj", "q_proj", "up_proj", "down_proj"],
    "nemotron3": ["fc1_latent_proj", "fc2_latent_proj", "down_proj"],
}
if EVERY_ARCHITECTURE:  # PEFT trains experts and routers with "all-linear", and latent attention has parts.
    MODELS = {**{arch: ["q_a_proj", "k_proj", "o_proj"] for arch in TINY_MODELS}, **MODELS}
LENGTHS = (37, 1, 9, 20)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    if unavailable_reason():
        yield
        return
    before = load_native().num_threads()
    yield
    load_native().set_num_threads(before)


def load(path: Path, kernels: str, max_loras: int) -> DecoderModel:
    files = resolve_model(str(path))
    config = files.config()
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    model = build_model(
        config, weights, dtype=torch.float32, device="cpu", kernels=kernels, max_loras=max_loras, max_lora_rank=16
    )
    model.allocate_kv_cache(64, 8)
    model.allocate_states(12)
    return model


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(256) for _ in range(LENGTHS[index % len(LENGTHS)])] for index in range(count)]


@torch.inference_mode()
def logits(model: DecoderModel, lora_ids: list[int], tokens: list[list[int]]) -> list[torch.Tensor]:
    """The logits of all prompts in one step, each with its adapter."""
    tables = Tables(64, 8)
    step = pack(tables, [(index, 0, len(prompt)) for index, prompt in enumerate(tokens)])
    assert model.lora is not None
    counts = [len(prompt) for prompt in tokens]
    model.lora.batch.set_slots(np.repeat([model.lora.slot_of(lora_id) for lora_id in lora_ids], counts))
    flat = torch.tensor([token for prompt in tokens for token in prompt])
    states = state_step(counts, [-1] * len(counts), range(len(counts)))
    hidden = model.forward(flat, step.positions, model.plan(step.metadata, states=states))
    return [rows.clone() for rows in torch.split_with_sizes(model.logits(hidden), counts)]


LORA_IDS = (2, 0, 1, 2)


@pytest.mark.parametrize("arch", MODELS)
def test_logits_are_those_of_merged_weights(arch: str, tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Of four prompts in one step, of which one has no adapter."""
    folder, modules = tiny_model_dir(arch), MODELS[arch]
    adapters = [
        write_adapter(folder, tmp_path / "a", seed=1, target_modules=modules, r=6, lora_alpha=9),
        write_adapter(folder, tmp_path / "b", seed=2, target_modules=modules, r=2, lora_alpha=4, use_rslora=True),
    ]
    models, tokens = [merged_model(folder, path) for path in (None, *adapters)], prompts(len(LORA_IDS))
    with torch.inference_mode():
        expected = [models[i](torch.tensor([each])).logits[0] for i, each in zip(LORA_IDS, tokens, strict=True)]
    for kernels in (*KERNEL_SETS, *(["reference"] if arch in WITH_REFERENCE else [])):
        model = load(folder, kernels, max_loras=3)
        assert model.lora is not None
        for index, path in enumerate(adapters, 1):
            model.lora.load(index, read_lora_adapter(str(path), model.config, 16))
        for ours, theirs in zip(logits(model, list(LORA_IDS), tokens), expected, strict=True):
            assert_close(ours, theirs)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=5e-4 * max(1.0, float(theirs.abs().max())))


@loop_over(
    "arch", ["llama", "qwen3_5", "qwen3_5_moe", "lfm2", "granite4_h", "granite4_h_moe", "nemotron_h", "nemotron3"]
)
def test_adapters_fit_gguf_files(arch: str, tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Converters change the order of rows and columns, and divide matrices; adapters have those of transformers."""
    folder = tiny_model_dir(arch, **OVERRIDES.get(arch, {}))
    adapter = write_adapter(folder, tmp_path / arch, target_modules=MODELS[arch], r=6, lora_alpha=9)
    model = load(write_gguf(folder, arch, tmp_path / f"{arch}.gguf"), "torch", max_loras=1)
    assert model.lora is not None
    model.lora.load(1, read_lora_adapter(str(adapter), model.config, 16))
    (tokens,) = prompts(1)
    with torch.inference_mode():
        expected = merged_model(folder, adapter)(torch.tensor([tokens])).logits[0]
    assert_close(logits(model, [1], [tokens])[0], expected)
    assert (logits(model, [0], [tokens])[0] - expected).abs().max() > 0.1


@loop_over(("arch", "module"), [("falcon_h1", "mamba.out_proj"), ("nemotron_h", "mixer.out_proj")])
def test_output_projections_of_mamba(
    arch: str, module: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """PEFT does not train them in these architectures, but other programs do."""
    folder = tiny_model_dir(arch)
    merged, tensors, draw = merged_model(folder, None), {}, torch.Generator().manual_seed(5)
    changed = {name: each for name, each in merged.named_parameters() if name.endswith(f"{module}.weight")}
    for name, weight in changed.items():
        a, b = (SIZE * torch.randn(shape, generator=draw) for shape in ((4, weight.shape[1]), (len(weight), 4)))
        weight.data += 2 * b @ a
        for kind, matrix in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name.removesuffix('weight')}lora_{kind}.weight"] = matrix
    adapter = write_adapter(folder, tmp_path / arch, target_modules=["q_proj"], r=4, lora_alpha=8)
    save_file(tensors, adapter / "adapter_model.safetensors")
    model = load(folder, "torch", max_loras=1)
    assert model.lora is not None
    model.lora.load(1, read_lora_adapter(str(adapter), model.config, 16))
    (tokens,) = prompts(1)
    with torch.inference_mode():
        expected = merged(torch.tensor([tokens])).logits[0]
    assert_close(logits(model, [1], [tokens])[0], expected)
    assert (logits(model, [0], [tokens])[0] - expected).abs().max() > 0.1


def test_every_variant_is_that_of_merged_weights(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model_dir("llama")
    model = load(folder, "torch", max_loras=1)
    assert model.lora is not None
    tokens, base = prompts(1), None
    for number, variant in enumerate(VARIANTS, 1):
        path = write_adapter(folder, tmp_path / str(number), seed=number, **variant)
        model.lora.clear()
        model.lora.load(number, read_lora_adapter(str(path), model.config, 16))
        base = logits(model, [0], tokens)[0] if base is None else base
        found = logits(model, [number], tokens)[0]
        with torch.inference_mode():
            expected = merged_model(folder, path)(torch.tensor(tokens)).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert (found - base).abs().max() > 0.1
        # A slot that is used again has nothing of the adapter before.
        torch.testing.assert_close(logits(model, [0], tokens)[0], base, rtol=0, atol=0)


@needs_native
@pytest.mark.parametrize("isa", [] if unavailable_reason() else load_native().available_isas())
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(
    isa: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    native = load_native()
    before = native.isa()
    folder = tiny_model_dir("llama", hidden_size=72, head_dim=12, intermediate_size=100)
    try:
        native.set_isa(isa)
        model = load(folder, "native", max_loras=2)
        assert model.lora is not None
        for lora_id in (1, 2):
            path = write_adapter(
                folder, tmp_path / str(lora_id), lora_id, target_modules="all-linear", r=4 + lora_id, lora_alpha=8
            )
            model.lora.load(lora_id, read_lora_adapter(str(path), model.config, 16))
        tokens = prompts(12)
        together = logits(model, [index % 3 for index in range(12)], tokens)
        for index in (0, 1, 2, 5):
            alone = logits(model, [index % 3], [tokens[index]])[0]
            torch.testing.assert_close(together[index], alone, rtol=0, atol=0)
        assert (together[1] - logits(model, [0], [tokens[1]])[0]).abs().max() > 0.1
    finally:
        native.set_isa(before)
