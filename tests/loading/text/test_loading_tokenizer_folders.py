"""Generated tokenizer folders: ids equal those of transformers' AutoTokenizer, for texts and for pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import write_folder
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from chairlift.errors import ModelLoadError
from chairlift.loading.text.hf_tokenizer import folder_tokenizer

TEXTS = [
    "The quick brown fox",
    "  two  spaces ",
    "naïve Café 東京 123 हिन्दी e\u0301\u0302x",
    "a\n\nb",
    "x",
    "",
    "</s> [SEP] <|im_end|>x kilo metre",
]
PAIRS = [
    ("The quick brown fox", "naïve Café"),
    ("", "x"),
    ("a\n\nb </s>", "  two  spaces"),
    ("x", "<|im_end|> kilo metre"),
]


@pytest.mark.parametrize("part", range(4))
def test_ids_equal_auto_tokenizer(tmp_path: Path, part: int) -> None:
    for seed in range(part * 25, part * 25 + 25):
        settings = write_folder(tmp_path / str(seed), seed)
        oracle: Any = AutoTokenizer.from_pretrained(tmp_path / str(seed))
        ours, where = folder_tokenizer(tmp_path / str(seed)), (seed, type(oracle).__name__, settings)
        for text in TEXTS:
            assert ours.encode(text) == ours.encode_pair(text)[0] == oracle(text)["input_ids"], (text, where)
        for pair in PAIRS:
            assert ours.encode_pair(*pair)[0] == oracle(*pair)["input_ids"], (pair, where)


def test_the_class_of_the_model_type_overrules_a_wrong_one(tmp_path: Path) -> None:
    """Folders of Qwen3.5 may name the class of Qwen2, which divides words at combining marks."""
    write_folder(tmp_path, 0)
    pieces = {}
    for model_type in ("qwen3", "qwen3_5"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
        oracle: Any = AutoTokenizer.from_pretrained(tmp_path)
        backends = folder_tokenizer(tmp_path).backend, oracle.backend_tokenizer
        ours, theirs = (backend.pre_tokenizer.pre_tokenize_str("हिन्दी भाषा") for backend in backends)
        assert ours == theirs
        pieces[model_type] = len(ours)
    assert pieces["qwen3"] > pieces["qwen3_5"] == 2


def test_flags_do_not_replace_the_tokens_of_an_embedding_model(tmp_path: Path) -> None:
    """The tokenizer of Qwen3-Embedding appends a token, whose hidden state is the vector."""
    write_folder(tmp_path, 0)
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    (tmp_path / "added_tokens.json").unlink(missing_ok=True)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    end = ("<|endoftext|>", 0)
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[end]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for flags in ({}, {"add_bos_token": False, "bos_token": None}, {"add_bos_token": True, "add_eos_token": True}):
        settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", **flags}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        ours = folder_tokenizer(tmp_path)
        assert (ours.encode("fox")[-1], ours.encode_pair("a", "b")[0].count(0)) == (0, 2)


def test_a_class_whose_special_tokens_are_missing_replaces_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path, 0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert folder_tokenizer(tmp_path).encode("The fox") == backend.encode("The fox").ids


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": "a"}},
        {"added_tokens_decoder": [1]},
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": "yes",
            "unk_token": "x",
            "cls_token": "x",
            "sep_token": "x",
        },
    ],
)
def test_settings_of_a_wrong_type_are_an_error(tmp_path: Path, settings: dict[str, Any]) -> None:
    write_folder(tmp_path, 0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: has a value of a wrong type"):
        folder_tokenizer(tmp_path)
