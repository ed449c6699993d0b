"""Tokens that have no row in the embedding are rejected in prompts, and are never generated."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from safetensors.torch import load_file

from chairlift import LLM, EngineConfig, SamplingParams, StructuredOutputs
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ConfigError, RequestError
from support.byte_tokenizer import with_byte_tokenizer, write_byte_tokenizer
from support.case_loop import loop_over
from support.gguf_files import gguf_name, write_gguf

ADDED = ("[PAD]", "<img>")
TinyModelDir = Callable[..., Path]


def write_model(folder: Path, tiny_model_dir: TinyModelDir, added: tuple[str, ...] = ADDED, **config: Any) -> Path:
    """A model with a row for each token of the byte tokenizer, but none for the added tokens."""
    folder.mkdir(exist_ok=True)
    path = write_byte_tokenizer(folder) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    with_byte_tokenizer(tiny_model_dir("llama", vocab_size=backend.get_vocab_size(), **config), folder)
    backend.add_special_tokens(list(added))
    backend.save(str(path))
    return folder


@pytest.fixture(scope="module")
def llm(tiny_model_dir: TinyModelDir, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_model(tmp_path_factory.mktemp("padded"), tiny_model_dir)
    return LLM(model=str(folder), num_threads=1, num_kv_blocks=64)


def num_rows(llm: LLM) -> int:
    return llm.engine.facts.model_config.vocab_size


@loop_over("offset", [0, 1, 2, 1 << 40])
def test_prompts_of_ids_are_rejected(offset: int, llm: LLM) -> None:
    with pytest.raises(RequestError, match=rf"contains a token id outside 0\.\.{num_rows(llm) - 1}, the rows of"):
        llm.generate([[5, num_rows(llm) + offset]], use_tqdm=False)


@loop_over("text", ["[PAD]", "a <img> b"])
def test_prompts_of_text_are_rejected(text: str, llm: LLM) -> None:
    token = text.removeprefix("a ").removesuffix(" b")
    with pytest.raises(RequestError, match=rf"the model's embedding: \d+ \('{re.escape(token)}'\). Leave it out"):
        llm.generate([text], use_tqdm=False)


def test_content_of_messages_spells_them(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "a [PAD] b"}], SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.prompt_token_ids is not None
    assert max(output.prompt_token_ids) < num_rows(llm)
    assert "[PAD]" in llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)


@loop_over("name", ["allowed_token_ids", "logit_bias", "stop_token_ids"])
def test_parameters_cannot_name_them(name: str, llm: LLM) -> None:
    value: Any = {num_rows(llm): 100.0} if name == "logit_bias" else [num_rows(llm)]
    with pytest.raises(RequestError, match=f"{name}: token id {num_rows(llm)} is outside"):
        llm.generate(["a"], SamplingParams(**{name: value}), use_tqdm=False)


@loop_over(
    "options",
    [
        {"temperature": 50.0, "seed": 3, "ignore_eos": True},
        {"structured_outputs": StructuredOutputs(grammar="start: <[*]>{40}")},
        {"structured_outputs": StructuredOutputs(choice=["[PAD]", "<img>"])},
        {"use_beam_search": True, "n": 3, "ignore_eos": True},
    ],
)
def test_they_are_never_generated(options: dict[str, Any], llm: LLM) -> None:
    (output,) = llm.generate(["a"], SamplingParams(max_tokens=40, **options), use_tqdm=False)
    assert all(max(each.token_ids) < num_rows(llm) for each in output.outputs)


def test_they_are_named_and_end_no_answer(
    tiny_model_dir: TinyModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, tiny_model_dir, tuple(f"<{index}>" for index in range(7)))
    settings = {"bos_token": "<bos>", "eos_token": "<3>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING, "chairlift"):
        loaded = load_model(EngineConfig(str(folder), kernels="torch", num_threads=1))
    rows = loaded.config.vocab_size
    assert all(token_id < rows for token_id in loaded.config.eos_token_ids)
    named = "7 tokens of the tokenizer ('<0>', '<1>', '<2>', '<3>', '<4>', ...) cannot be used, because the embedding"
    assert any(f"{named} has only {rows} rows" in message for message in caplog.messages)


def test_a_draft_model_may_lack_them(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tiny_model_dir, ())
    tuned = write_model(tmp_path / "tuned", tiny_model_dir)
    options: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 64, "speculative_config": {"model": str(base)}}
    build_engine(EngineConfig(str(tuned), **options))
    path = base / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|tool|>"', '"<|other|>"'))
    with pytest.raises(ConfigError, match="its tokenizer differs"):
        build_engine(EngineConfig(str(tuned), **options))


@loop_over("declared", [256, 258])
def test_a_gguf_file_has_the_rows_of_its_tensor(declared: int, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    tokens = [*map(chr, range(0x21, 0x7F)), *(f"<|{number}|>" for number in range(258 - 94))]
    kinds = [gguf.TokenType.NORMAL if len(token) == 1 else gguf.TokenType.CONTROL for token in tokens]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["ab", *tokens[1:]],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 95,
    }
    metadata["llama.vocab_size"] = declared
    tensors = {
        gguf_name(name): tensor for name, tensor in load_file(tiny_model_dir("llama") / "model.safetensors").items()
    }
    path = write_gguf(tmp_path / f"{declared}.gguf", tensors, metadata=metadata)
    llm = LLM(model=str(path), num_threads=1, num_kv_blocks=16)
    assert num_rows(llm) == 256
    with pytest.raises(RequestError, match=r"outside 0\.\.255, .*: 257 \('<\|163\|>'\)"):
        llm.generate(["a<|163|>"], use_tqdm=False)
    assert llm.generate(["ab"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
