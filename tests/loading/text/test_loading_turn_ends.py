"""The end of a turn: tokens of the configuration, of the tokenizer and of the chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import transformers

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.loading.text.template_check import add_turn_ends, end_of_turn
from chairlift.loading.text.tokenizer import Tokenizer
from support.chat_templates import TEMPLATES
from support.chat_tokenizers import BACKENDS
from support.gguf_files import gguf_name, write_gguf
from support.tiny_tokenizer import write_tokenizer

ENDS = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama31": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "phi3": "<|end|>",
    "hermes": "<|im_end|>",
    "granite3": "<|end_of_text|>",
    "phi4_mini": "<|end|>",
    "smollm3": "<|im_end|>",
    "olmo3": "<|im_end|>",
    "gpt_oss": None,
    "ernie4_5": "</s>",
    "exaone4": "<|end|>",
    "deepseek": "<|end|>",
    "tiny": None,
}


def tokenizer(template: str | None) -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(BACKENDS["byte_level"](), special_tokens=special, chat_template=template)


@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_end_of_turn(name: str, end: str | None) -> None:
    made = tokenizer(TEMPLATES[name])
    found = end_of_turn(made)
    assert (None if found is None else made.id_to_token(found)) == end


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{% if %}", "{{ messages|length }}"])
def test_templates_that_show_no_end(template: str | None) -> None:
    assert end_of_turn(tokenizer(template)) is None


def test_other_ends_are_added_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = tokenizer(TEMPLATES["chatml"])
    eos, end = made.eos_token_id, made.token_to_id("<|im_end|>")
    assert eos is not None
    assert end is not None
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert add_turn_ends((7,), made, "m") == (7, eos, end)
        assert add_turn_ends((), made, "n") == (eos, end)
        assert add_turn_ends((end, eos), made, "o") == (end, eos)
    first, second = caplog.messages
    assert first.startswith("m: its tokenizer or chat template ends a turn with '</s>', '<|im_end|>', but its")
    assert "with no token" in second


def folder_model(model: Path, folder: Path) -> Path:
    """A folder whose config.json and generation_config.json name another end than its tokenizer."""
    write_tokenizer(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "Ġan"}))
    return folder


def test_a_folder_ends_with_the_token_of_its_tokenizer(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = folder_model(tiny_model_dir("llama"), tmp_path / "model")
    loaded = load_model(EngineConfig(model=str(folder), kernels="torch", num_threads=1))
    assert isinstance(loaded.tokenizer, Tokenizer)
    assert loaded.config.eos_token_ids == (0, 1, loaded.tokenizer.token_to_id("Ġan"))


def test_a_gguf_file_ends_with_the_token_of_its_template(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"))
    tokens = [*(chr(code) for code in range(0x21, 0x7F)), *(f"<|{number}|>" for number in range(256 - 94))]
    kinds = [gguf.TokenType.NORMAL if len(token) == 1 else gguf.TokenType.CONTROL for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 95,
        "tokenizer.chat_template": "{% for m in messages %}<|1|>{{ m.content }}<|7|>\n{% endfor %}",
    }
    tensors = {gguf_name(name): tensor.detach() for name, tensor in model.state_dict().items()}
    metadata["tokenizer.ggml.tokens"][0] = "ab"
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata)
    loaded = load_model(EngineConfig(model=str(path), kernels="torch", num_threads=1))
    assert isinstance(loaded.tokenizer, Tokenizer)
    assert loaded.config.eos_token_ids == (95, loaded.tokenizer.token_to_id("<|7|>"))
