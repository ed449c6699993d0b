"""Random models of the comparisons: complete folders with the same weights every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers import random_model as random_models
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_a_random_model_is_complete_and_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**random_models.RANDOM_MODELS["random-1b"], **SIZES, "intermediate_size": 96}
    monkeypatch.setitem(random_models.RANDOM_MODELS, "small", config)
    first, second = (random_models.random_model("small", tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    tensors = load_file(first / "model.safetensors")
    assert float(tensors["model.layers.1.mlp.up_proj.weight"].float().std()) == pytest.approx(0.02, rel=0.05)
    (first / "model.safetensors").write_bytes(b"")
    assert random_models.random_model("small", tmp_path / "a") == first
    assert (first / "model.safetensors").read_bytes() == b"", "a finished model is not created again"
    engine = LLM(str(second), num_kv_blocks=16)
    try:
        (output,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
    finally:
        engine.close()
