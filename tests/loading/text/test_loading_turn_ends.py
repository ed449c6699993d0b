"""The end of a turn: tokens of the configuration, of the tokenizer and of the chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import transformers
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.text.end_tokens import add_listed_ends
from chairlift.loading.text.template_check import add_turn_ends, end_of_turn
from chairlift.loading.text.tokenizer import Tokenizer
from support.call_templates import WRITING
from support.chat_templates import TEMPLATES
from support.chat_tokenizers import BACKENDS
from support.gguf_files import gguf_name, write_gguf, write_tokenizer_gguf
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


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("kimi_k3", "<|close|>"),
        ("gigachat3", "<|message_sep|>"),
        ("solar_open", "<|end|>"),
        ("muse_glimmer", "<|eot|>"),
    ],
)
def test_a_token_between_the_messages_of_a_turn_is_no_end(name: str, token: str) -> None:
    backend = BACKENDS["byte_level"]()
    backend.add_special_tokens([token])
    found = end_of_turn(Tokenizer(backend, special_tokens={"bos_token": "<s>"}, chat_template=WRITING[name][1]))
    assert found == (backend.token_to_id(token) if name == "muse_glimmer" else None)


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


FAMILIES = {
    # Tokens, the ends of generation_config.json, the end in a GGUF file, and the ends of an answer.
    "Llama 3.1": (
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>",
        "<|end_of_text|> <|eom_id|> <|eot_id|>",
        "<|eot_id|>",
        "<|end_of_text|> <|eom_id|> <|eot_id|>",
    ),
    "Qwen": (
        "<|endoftext|> <|im_start|> <|im_end|> <|fim_prefix|> <|fim_pad|> <|repo_name|> <|file_sep|>",
        "<|im_end|> <|endoftext|>",
        "<|im_end|>",
        "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|>",
    ),
    "gpt-oss": (
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
        "<|return|> <|endoftext|> <|call|>",
        "<|return|>",
        "<|endoftext|> <|return|> <|call|>",
    ),
    "Solar": ("<|end|> <|calls|> <|flush|>", "<|flush|>", "<|flush|>", "<|calls|> <|flush|>"),
    "SmolLM2": (
        "<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|> <|im_end|> <reponame>",
    ),
    "Gemma 4": ("<eos> <turn|> <|tool_response> </s>", "<eos> <turn|>", "<eos>", "<eos> <turn|> <|tool_response>"),
    "Llama 2": ("<unk> <s> </s>", "</s>", "</s>", "</s>"),
    "Phi 4": ("<|endoftext|> <|end|> <|return|>", "<|end|>", "<|endoftext|>", "<|endoftext|> <|end|> <|return|>"),
}
WORDS = ["a", "b", "</s>", "<|fim_pad|>", "<PAD>"]
"""Ordinary entries, of which llama.cpp makes control tokens, except of `</s>` here."""


def folder_tokenizer_of(tokens: list[str]) -> Tokenizer:
    words = [word for word in WORDS[:3] if word not in tokens]
    backend = Backend(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return Tokenizer(backend)


def gguf_tokenizer_of(folder: Path, tokens: list[str], kinds: list[int]) -> Tokenizer:
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": ["a b"]}
    return GGUFSource(write_tokenizer_gguf(folder / "t.gguf", metadata), "t").tokenizer()


def texts_of(ends: tuple[int, ...], tokenizer: Tokenizer) -> set[str | None]:
    return {tokenizer.id_to_token(token_id) for token_id in ends}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_a_gguf_file_end_at_the_same_tokens(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ends are those of llama.cpp (`llama_vocab_is_eog` of build 11549), except of `</s>` as a word."""
    tokens, folder_ends, gguf_end, ends = (text.split() for text in FAMILIES[family])
    words = ["ab", *(word for word in WORDS[:3] if word not in tokens)]
    found = {
        "folder": (folder_tokenizer_of(tokens), folder_ends),
        "file": (gguf_tokenizer_of(tmp_path, [*words, *tokens], [1] * len(words) + [3] * len(tokens)), gguf_end),
    }
    for kind, (made, given) in found.items():
        with caplog.at_level(logging.INFO, "chairlift"):
            ids = add_listed_ends(tuple(i for text in given if (i := made.token_to_id(text)) is not None), made, kind)
        assert texts_of(ids, made) == set(ends), kind
        assert caplog.messages[-1].startswith(f"{kind}: an answer ends with {given[0]!r} (")


def test_an_end_token_is_special_whatever_its_type(tmp_path: Path) -> None:
    made = gguf_tokenizer_of(tmp_path, ["ab", *WORDS], [1, 1, 1, 1, 1, 4])
    assert texts_of(add_listed_ends((), made, "m"), made) == {"<|fim_pad|>", "<PAD>"}
    assert made.encode("<|fim_pad|>a<PAD>") == [4, 1, 5]
    assert made.decode([4, 1, 5]) == "a"


def test_padding_and_control_tokens_of_a_conversion_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    padding = [f"[PAD{number}]" for number in range(300, 320)]
    tokens = ["ab", "a", "b", "<|tool|>", "<|im_end|>", "<|reserved_special_token_0|>", "<tool>", "unused", *padding]
    with caplog.at_level(logging.INFO, "chairlift"):
        gguf_tokenizer_of(tmp_path, tokens, [1, 1, 1, 3, 3, 3, 4, 5] + [5] * 10 + [4] * 10)
    first, second = caplog.messages
    assert "t.gguf: 'unused', '[PAD300]', '[PAD301]'" in first
    assert "'[PAD310]' and 9 more pad the vocabulary" in first
    assert "t.gguf: '<|tool|>' are control tokens" in second
    caplog.clear()
    with caplog.at_level(logging.INFO, "chairlift"):
        gguf_tokenizer_of(tmp_path, ["ab", "a", "b", "<tool>"], [1, 1, 1, 4])
    assert not caplog.messages
