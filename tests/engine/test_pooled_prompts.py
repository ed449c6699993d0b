"""Tests which tokens of texts a model pools, and the limits of instructions and of truncation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import LLM
from chairlift.engine.pooled_prompts import PooledOptions
from chairlift.errors import ModelLoadError, RequestError
from chairlift.loading.pooled_text_config import static_text_settings, tokenizer_text_config
from chairlift.loading.text.marked_text import MarkedText
from support.case_loop import loop_over
from support.pooling_models import edit_json, write_pooling_model


def write_model(folder: Path, **settings: Any) -> Path:
    """A decoder that does not pool the tokens of its prompt, with settings of the Transformer."""
    write_pooling_model(folder, "qwen3")
    prompts = {"prompts": {"q": "query: the fox "}, "default_prompt_name": "q"}
    edit_json(folder / "config_sentence_transformers.json", **prompts)
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    edit_json(folder / "sentence_bert_config.json", **settings)
    return folder


def load(folder: Path) -> LLM:
    return LLM(model=str(folder), num_threads=1, dtype="float32", num_kv_blocks=60)


def test_the_tokens_that_are_not_pooled_are_those_of_the_prompt(tmp_path: Path) -> None:
    processor = load(write_model(tmp_path)).engine.input_processor
    whole = processor.encode_pooled("dog")
    assert processor.encode_pooled("dog", None, PooledOptions(len(whole), "right")) == whole

    @loop_over(
        ("options", "message"),
        [
            (PooledOptions(4), "input has no token behind the .* tokens of the prompt, which this model leaves out"),
            (PooledOptions(len(whole), "left"), "truncation_side must be right with a truncation"),
            (PooledOptions(add_special_tokens=False), "add_special_tokens must be true, because this model"),
        ],
    )
    def check(options: PooledOptions, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            processor.encode_pooled("dog", None, options)

    check()
    with pytest.raises(RequestError, match="messages must be text: this model leaves the tokens of its prompt out"):
        processor.encode_pooled_messages(MarkedText("fox"), PooledOptions())


def test_an_empty_text_behind_a_prompt_without_end_token(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_model(tmp_path, processing_kwargs={"text": {"add_special_tokens": False}})
    llm = load(folder)
    expected = SentenceTransformer(str(folder), device="cpu").encode(["dog"])
    assert np.abs(np.array(llm.embed("dog", use_tqdm=False)) - expected).max() < 1e-5
    with pytest.raises(RequestError, match="text has no token behind the"):
        llm.embed("", use_tqdm=False)


def test_long_instructions_are_rejected_or_not_kept(tmp_path: Path) -> None:
    form = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}
    folder = write_model(tmp_path, modality_config={"message": form})
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=True)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}dog[SEP]"
    (folder / "chat_template.jinja").write_text(template)
    processor = load(folder).engine.input_processor
    with pytest.raises(RequestError, match="instruction is 9000 bytes long"):
        processor.encode_pooled("fox", None, PooledOptions(instruction="a" * 9000))
    assert processor._pooled is not None
    for length, num_kept in ((6000, 0), (60, 1)):
        found = processor.encode_pooled("fox", None, PooledOptions(16, instruction="fox " * (length // 4)))
        assert (len(found), processor._pooled._suffix.cache_info().currsize) == (16, num_kept)


@loop_over(
    ("file", "content", "message"),
    [
        ("tokenizer.json", {"truncation": {"direction": "Up", "max_length": 9}}, "truncation.direction is 'Up', which"),
        ("tokenizer.json", {"truncation": {"direction": "Left"}}, "truncation.max_length is missing"),
        ("tokenizer.json", {"truncation": {"max_length": "9"}}, "truncation.max_length must be an integer"),
        ("tokenizer.json", {"truncation": [9]}, "truncation must be an object"),
        ("tokenizer_config.json", {"model_max_length": float("nan")}, "model_max_length must be a number of at least"),
    ],
)
def test_wrong_truncations_of_tokenizers(file: str, content: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=message):
        (static_text_settings if file == "tokenizer.json" else tokenizer_text_config)(tmp_path)
