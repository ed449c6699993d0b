"""KV memory that cannot be had is refused in words, whoever finds out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import LLM, EngineConfig
from chairlift.engine import loaded_model
from chairlift.errors import ConfigError
from chairlift.models.model import Model


@pytest.mark.parametrize("option", ["num_kv_blocks", "kv_cache_memory"])
@pytest.mark.parametrize("error", [MemoryError("Unable to allocate"), RuntimeError("can't allocate memory")])
def test_what_the_system_does_not_give_is_refused(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, option: str, error: Exception
) -> None:
    def refuse(_model: Model, _num_blocks: int, _block_size: int) -> None:
        raise error

    monkeypatch.setattr(Model, "allocate_kv_cache", refuse)
    config = EngineConfig(str(tiny_model_dir("llama")), skip_tokenizer_init=True, **{option: 10 << 20})  # type: ignore[arg-type]
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 1 << 60)
    with pytest.raises(ConfigError, match=rf"which cannot be had \({error}\): lower {option}"):
        LLM.from_config(config)


def test_more_than_the_machine_has_is_not_asked_for(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 1024)
    with pytest.raises(ConfigError, match=r"takes .* KiB, more than the 1 KiB there are: lower num_kv_blocks"):
        LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=60)
