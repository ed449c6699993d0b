"""Quantized checkpoints in the engine: logits and tokens of transformers with the same values, and planned memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.errors import ModelLoadError
from chairlift.kernels.kernel_memory import total
from chairlift.models.decoder import DecoderModel
from support.native import needs_native
from support.packed_steps import Tables, pack
from support.parameter_memory import parameter_bytes
from support.quantized_checkpoints import METHODS, write_checkpoint
from support.shared_models import shared_model

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 16, "num_key_value_heads": 8}
ARCHITECTURES = {"llama": "llama", "awq": "qwen2", "gptq-act-order": "qwen3", "fp8": "qwen3", "w4a16": "phi3"}
PROMPTS = ((0, 33), (1, 1), (2, 60))
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=METHODS)
def checkpoint(
    request: pytest.FixtureRequest, tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """A method, a folder that is quantized by it, and a folder with the same values in float32."""
    name, folder = request.param, tmp_path_factory.mktemp("quantized")
    source = tiny_model_dir(ARCHITECTURES.get(name, "llama"), **WIDE)
    values = write_checkpoint(source, folder / "quantized", METHODS[name])
    write_floats(source, folder / "floats", values)
    return name, folder / "quantized", folder / "floats"


def write_floats(source: Path, target: Path, values: dict[str, torch.Tensor]) -> None:
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())


def load_folder(folder: Path, kernels: str, **options: Any) -> LoadedModel:
    return load_model(
        EngineConfig(model=str(folder), kernels=kernels, skip_tokenizer_init=True, num_threads=1, **options)
    )


def prompts() -> dict[int, list[int]]:
    draw = random.Random(0)
    return {sequence: [draw.randrange(3, 256) for _ in range(length)] for sequence, length in PROMPTS}


@torch.inference_mode()
def logits(model: DecoderModel) -> torch.Tensor:
    model.allocate_kv_cache(64, 8)
    step = pack(Tables(64, 8), [(sequence, 0, length) for sequence, length in PROMPTS])
    tokens = torch.tensor([token for prompt in prompts().values() for token in prompt])
    return model.logits(model.forward(tokens, step.positions, model.plan(step.metadata))).clone()


@lru_cache(maxsize=1)
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
@torch.inference_mode()
def expected_logits(folder: Path) -> torch.Tensor:
    model = oracle(folder)
    return torch.cat([model(torch.tensor([tokens])).logits[0] for tokens in prompts().values()])


def test_logits_are_those_of_transformers_with_the_same_values(checkpoint: tuple[str, Path, Path]) -> None:
    _, folder, floats = checkpoint
    expected = expected_logits(floats)
    loaded = load_folder(folder, "torch")
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-3, atol=1e-3)
    check_planned_bytes(loaded)


@needs_native
def test_native_logits_differ_by_the_rounding_of_activations(checkpoint: tuple[str, Path, Path]) -> None:
    name, folder, floats = checkpoint
    loaded = load_folder(folder, "native", kv_cache_dtype="float32")
    found = logits(loaded.model)
    expected = expected_logits(floats)
    if METHODS[name].is_float and METHODS[name].bits == 8:
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    # Activations in 8 bits cause errors of 2% to 10% in these random models.
    assert float((found - expected).norm() / expected.norm()) < 0.12
    check_planned_bytes(loaded)


def check_planned_bytes(loaded: LoadedModel) -> None:
    """The planned bytes are those of the loaded model."""
    assert total(loaded.planned_weights) == parameter_bytes(loaded.model)


@torch.inference_mode()
def test_engine_generates_the_tokens_of_transformers(checkpoint: tuple[str, Path, Path]) -> None:
    """An answer is greedy if each of its tokens has the largest logit after those before it."""
    _, folder, floats = checkpoint
    model = oracle(floats)
    found = answers(folder, kernels="torch", max_num_batched_tokens=16)
    for prompt, answer in zip(prompts().values(), found, strict=True):
        assert len(answer) == NEW_TOKENS
        scores = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == scores.argmax(-1).tolist()


@needs_native
def test_native_engine_generates_the_same_tokens_in_any_batch(checkpoint: tuple[str, Path, Path]) -> None:
    _, folder, _ = checkpoint
    whole = answers(folder, kernels="native")
    assert answers(folder, kernels="native", max_num_batched_tokens=7, max_num_seqs=1) == whole


def answers(folder: Path, **options: Any) -> list[list[int]]:
    config = EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        num_threads=1,
        num_kv_blocks=200,
        kv_cache_dtype="float32",
        **{"max_num_seqs": len(PROMPTS), **options},
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm = LLM(engine=build_engine(config, loaded=shared_model(config)))
    outputs = llm.generate(list(prompts().values()), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@needs_native
def test_matrices_with_different_orders_of_inputs_are_rejected(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    write_checkpoint(tiny_model_dir("llama", **WIDE), folder, METHODS["gptq-act-order"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"up_proj\.g_idx has another order .*--kernels torch"):
        load_folder(folder, "native")
