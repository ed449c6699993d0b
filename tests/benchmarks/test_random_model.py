"""Random models of the comparisons: complete folders with the same weights every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers import random_model as random_models
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERT_SIZES = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "matrix"),
    [
        ("random-1b", {"intermediate_size": 96}, "mlp.up_proj"),
        ("random-moe", EXPERT_SIZES, "mlp.experts.3.up_proj"),
        ("random-lfm2-1.2b", {"intermediate_size": 512, "layer_types": ["conv", "full_attention"]}, "feed_forward.w1"),
        ("random-qwen3.5-0.8b", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attn.in_proj_qkv"),
    ],
)
def test_a_random_model_is_complete_and_reproducible(
    name: str, sizes: dict[str, int], matrix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**random_models.RANDOM_MODELS[name], **SIZES, **sizes}
    monkeypatch.setitem(random_models.RANDOM_MODELS, "small", config)
    first, second = (random_models.random_model("small", tmp_path / folder) for folder in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    tensors = load_file(first / "model.safetensors")
    assert float(tensors[f"model.layers.1.{matrix}.weight"].float().std()) == pytest.approx(0.02, rel=0.05)
    (first / "model.safetensors").write_bytes(b"")
    assert random_models.random_model("small", tmp_path / "a") == first
    assert (first / "model.safetensors").read_bytes() == b"", "a finished model is not created again"
    engine = LLM(str(second), num_kv_blocks=16)
    try:
        (output,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
    finally:
        engine.close()
