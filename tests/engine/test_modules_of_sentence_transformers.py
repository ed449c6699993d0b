"""Tests vectors and scores of folders that sentence-transformers writes: modules, prompts, limits and activations."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM
from chairlift.engine.pooled_prompts import PooledOptions
from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.server.api.pooling import RerankRequest, rerank_documents
from support.case_loop import loop_over
from support.pooling_models import ROBERTA_TOKENS, SIZES, TEXTS, edit_json, make_model, random_values, write_tokenizer

SIZE: Final = SIZES["hidden_size"]
PAIRS: Final = [(TEXTS[0], text) for text in TEXTS[1:]] + [(TEXTS[5], TEXTS[6]), ("[SEP] fox", "dog [SEP] lazy")]
TURNS: Final = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
FLAT: Final = TURNS + "{% if add_generation_prompt %}fox{% endif %}dog[SEP]"
PARTS: Final = (
    "{% for m in messages %}<{{ m['role'] }}> {% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %} {% endfor %}[SEP]"
)
PAIR: Final = (
    "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }} {% endfor %}"
    "{% for m in messages if m['role'] == 'query' %}the {{ m['content'] }} and {% endfor %}"
    "{% for m in messages if m['role'] == 'document' %}{{ m['content'] }}{% endfor %} fox[SEP]"
)


def dense(inputs: int, size: int, name: str = "Tanh", **options: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Dense

    return random_values(Dense(inputs, size, activation_function=getattr(torch.nn, name)(), **options))


def pooling(*modes: str, size: int = SIZE, **options: Any) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling(size, modes or "mean", **options)  # type: ignore[arg-type]


def normalize(*names: str) -> Any:
    from sentence_transformers.sentence_transformer.modules import Normalize

    return Normalize(*names)


def layer_norm() -> Any:
    from sentence_transformers.sentence_transformer.modules import LayerNorm

    return random_values(LayerNorm(SIZE))


def logit_score(negative: int | None) -> Any:
    from sentence_transformers.cross_encoder.modules import LogitScore

    return LogitScore(9, negative)


def write_model(folder: Path, kind: str, config: dict[str, Any], tokenizer: dict[str, Any], template: str) -> Path:
    """A model of transformers with its tokenizer, changed settings and a chat template."""
    make_model(kind, num_hidden_layers=2, **config).save_pretrained(folder)
    special = ROBERTA_TOKENS if kind.startswith("roberta") else ()
    write_tokenizer(folder, "[SEP]" if kind.startswith(("qwen3", "gemma3")) else None, special)
    edit_json(folder / "tokenizer_config.json", **tokenizer)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_modules(
    folder: Path,
    modules: list[Any],
    kind: str = "bert",
    *,
    config: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    template: str = "",
    transformer: dict[str, Any] | None = None,
    is_cross_encoder: bool = False,
    **options: Any,
) -> Path:
    """The folder that sentence-transformers writes of a model with these modules behind the Transformer.

    Args:
        config, tokenizer: settings of the model and of its tokenizer.
        transformer: arguments of the module Transformer.
        options: arguments of SentenceTransformer or CrossEncoder.
    """
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    source = write_model(folder.parent / "source", kind, config or {}, tokenizer or {}, template)
    parts = [Transformer(str(source), **(transformer or {})), *modules]
    family: Any = CrossEncoder if is_cross_encoder else SentenceTransformer
    family(modules=parts, device="cpu", **options).save_pretrained(str(folder), create_model_card=False)
    shutil.rmtree(source)
    return folder


def load(folder: Path, **options: Any) -> LLM:
    config = json.loads((folder / "config.json").read_text())
    sees_all = config.get("is_causal") is False or config.get("use_bidirectional_attention")
    if config["architectures"][0].startswith(("Qwen3", "Gemma3")) and not sees_all:
        options["num_kv_blocks"] = 60
    return LLM(model=str(folder), num_threads=1, dtype="float32", **options)


ROUNDING = 1e-5  # of two implementations in float32, for values of about 1 and other random weights in each run


def difference(found: Any, expected: Any) -> float:
    """The largest difference, relative to the size of the values if they are above 1."""
    assert np.shape(found) == np.shape(expected)
    return float((np.abs(np.array(found) - expected) / np.maximum(np.abs(expected), 1.0)).max())


def reset(folder: Path) -> Path:
    for each in (folder, folder.parent / "source"):
        shutil.rmtree(each, ignore_errors=True)
    return folder


GEMMA: Final[dict[str, Any]] = {"use_bidirectional_attention": True, "sliding_window": 8}
PROMPT: Final[dict[str, Any]] = {"prompts": {"q": "query: the fox ", "d": "x"}, "default_prompt_name": "q"}
SHORT: Final = {"model_max_length": 16}
EMBEDDERS: Final[list[tuple[list[Any] | Callable[[], list[Any]], dict[str, Any]]]] = [
    (lambda: [pooling("max")], {}),
    (lambda: [pooling("mean_sqrt_len_tokens", "cls", "weightedmean")], {}),
    (lambda: [pooling("lasttoken", "weightedmean", "max", "cls"), normalize()], {"kind": "qwen3bare"}),
    (lambda: [pooling("mean"), normalize()], {"kind": "qwen3bare", "config": {"is_causal": False}}),
    (
        lambda: [
            pooling(),
            dense(SIZE, 96, "Identity", bias=False),
            dense(96, 40, "Identity", bias=False),
            normalize(),
        ],
        {"kind": "gemma3", "config": GEMMA},
    ),
    (lambda: [pooling()], {"kind": "gemma3", "config": {"sliding_window": 8}}),
    (lambda: [pooling()], {"kind": "gemma3", "config": {"sliding_window": 8, "is_causal": False}}),
    (lambda: [pooling(), dense(SIZE, SIZE, "GELU", use_residual=True), dense(SIZE, 32, use_residual=True)], {}),
    (lambda: [dense(SIZE, 40, module_input_name="token_embeddings"), pooling(size=40)], {}),
    (lambda: [normalize("token_embeddings"), pooling(), layer_norm()], {}),
    (lambda: [pooling(), normalize()], {"truncate_dim": 16}),
    (lambda: [pooling()], PROMPT),
    (lambda: [pooling("weightedmean", "cls", include_prompt=False)], PROMPT),
    (lambda: [pooling("mean", include_prompt=False)], {"kind": "qwen3bare", **PROMPT}),
    (lambda: [pooling()], {"tokenizer": SHORT}),
    (lambda: [pooling("lasttoken")], {"kind": "qwen3bare", "tokenizer": SHORT}),
    (lambda: [pooling()], {"tokenizer": {**SHORT, "truncation_side": "left"}}),
    (
        lambda: [pooling()],
        {"transformer": {"processing_kwargs": {"text": {"max_length": 14, "add_special_tokens": False}}}},
    ),
    (lambda: [pooling("lasttoken")], {"kind": "qwen3bare", "template": FLAT}),
    (lambda: [pooling("lasttoken")], {"kind": "qwen3bare", "template": PARTS, **PROMPT}),
    (
        lambda: [pooling("lasttoken")],
        {
            "kind": "qwen3bare",
            "template": FLAT,
            "tokenizer": SHORT,
            "transformer": {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
        },
    ),
]


@loop_over(("modules", "options"), EMBEDDERS)
def test_vectors(modules: Callable[[], list[Any]], options: dict[str, Any], tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_modules(reset(tmp_path / "model"), modules(), **options)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=3)
    assert difference(load(folder).embed(TEXTS, truncate_prompt_tokens=-1, use_tqdm=False), expected) < ROUNDING


def test_states_are_pooled_over_several_steps(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", [pooling("mean", "weightedmean", "max", "cls")], "qwen3bare")
    whole, divided = (
        load(folder, **options).embed(TEXTS * 2, use_tqdm=False)
        for options in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 4})
    )
    assert difference(divided, np.array(whole)) < 1e-5
    for options in ({"enable_prefix_caching": True}, {"preemption_mode": "swap"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} has no use for 'model', which pools the states"):
            load(folder, **options)


def test_lower_case(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_modules(tmp_path / "model", [pooling()], transformer={"do_lower_case": True})
    edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert difference(load(folder).embed(TEXTS, use_tqdm=False), expected) < ROUNDING


def test_static_vectors(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(20)
    table = torch.randn((tokenizer.get_vocab_size(), 24), generator=torch.Generator().manual_seed(0))
    folder, older = tmp_path / "model", tmp_path / "older"
    modules = [StaticEmbedding(tokenizer, embedding_weights=table), normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder), create_model_card=False)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    shutil.copytree(folder, older)
    (older / "0_StaticEmbedding").mkdir()
    shutil.move(older / "tokenizer.json", older / "0_StaticEmbedding")
    save_file({"embeddings": load_file(older / "model.safetensors")["embedding.weight"]}, older / "model.safetensors")
    shutil.move(older / "model.safetensors", older / "0_StaticEmbedding")
    entries = json.loads((older / "modules.json").read_text())
    entries[0]["path"] = "0_StaticEmbedding"
    (older / "modules.json").write_text(json.dumps(entries))
    for each in (folder, older):
        llm = LLM(model=str(each), num_threads=1)
        assert difference(llm.embed(TEXTS, truncate_prompt_tokens=-1, use_tqdm=False), expected) < ROUNDING
        with pytest.raises(RequestError, match="is empty"):
            llm.embed("")


CROSS_ENCODERS: Final[list[tuple[Callable[[], list[Any]], str, dict[str, Any]]]] = [
    (list, "bert-score", {"activation_fn": torch.nn.Identity()}),
    (list, "roberta-score", {"activation_fn": torch.nn.Tanh()}),
    (list, "bert-score", {"tokenizer": SHORT}),
    (list, "bert-score", {"tokenizer": {**SHORT, "truncation_side": "left"}}),
    (list, "bert-score", {"tokenizer": {"model_input_names": ["input_ids", "attention_mask"]}}),
    (list, "modernbert-score", PROMPT),
    (
        lambda: [pooling("cls"), dense(SIZE, SIZE), layer_norm(), dense(SIZE, 1, module_output_name="scores")],
        "bert",
        {},
    ),
    (lambda: [logit_score(7)], "qwen3", {}),
    (lambda: [logit_score(None)], "qwen3", {"activation_fn": torch.nn.Identity()}),
    (lambda: [logit_score(7)], "qwen3", {"template": PAIR, **PROMPT}),
    (lambda: [logit_score(7)], "qwen3", {"template": PAIR, "tokenizer": SHORT}),
]


@loop_over(("modules", "kind", "options"), CROSS_ENCODERS)
def test_scores(modules: Callable[[], list[Any]], kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    task = {"qwen3": "text-generation", "bert": "feature-extraction"}.get(kind, "sequence-classification")
    arguments = {"transformer": {"transformer_task": task}, "is_cross_encoder": True, **options}
    folder = write_modules(reset(tmp_path / "model"), modules(), kind, **arguments)
    # In a chat template the spelling of a special token remains text.
    pairs = PAIRS[:-1] if options.get("template") else PAIRS
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    llm = load(folder)
    found = llm.score(*map(list, zip(*pairs, strict=True)), truncate_prompt_tokens=-1, use_tqdm=False)
    assert difference(found, expected) < ROUNDING


@loop_over(
    "settings",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}},
    ],
)
def test_activations_of_older_cross_encoders(settings: dict[str, Any], tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = write_model(reset(tmp_path / "model"), "bert-score", {}, {}, "")
    edit_json(folder / "config.json", **settings)
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    assert difference(load(folder).score(*map(list, zip(*PAIRS, strict=True)), use_tqdm=False), expected) < ROUNDING


def test_a_reranker_without_settings_has_its_template_or_that_of_qwen3(tmp_path: Path) -> None:
    """A folder with LogitScore, but without the file of the Transformer, as published before it was added."""
    folder = write_modules(
        tmp_path / "model",
        [logit_score(7)],
        "qwen3",
        config={"max_position_embeddings": 400},
        tokenizer={"model_max_length": 400},
        transformer={"transformer_task": "text-generation"},
        is_cross_encoder=True,
    )
    (folder / "sentence_bert_config.json").unlink()
    first = load(folder).score(TEXTS[0], TEXTS[1:3], use_tqdm=False)
    own = load(folder, classifier_from_token=["lazy", "dog"]).engine.facts.pooling
    assert own is not None
    assert own.has_own_prompt
    planner: Any = SimpleNamespace(engine=load(folder, classifier_from_token=["lazy", "dog"]).engine)
    cut: dict[str, Any] = {"query": "fox", "documents": ["dog"], "truncate_prompt_tokens": -1}
    for side, ignored in (("left", ("truncation_side",)), ("right", ())):
        body = RerankRequest.model_validate({**cut, "truncation_side": side})
        assert rerank_documents.plan(planner, body).ignored == ignored
    (folder / "chat_template.jinja").write_text(PAIR)
    llm = load(folder)
    assert "the fox a ##n ##d dog fox" in llm.get_tokenizer().decode(
        llm.engine.input_processor.encode_pooled("fox", "dog")
    )
    assert difference(llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False), np.array(first)) > 1e-4
    (folder / "chat_template.jinja").write_text(TURNS)
    assert load(folder).score(TEXTS[0], TEXTS[1:3], use_tqdm=False) == first
    instructed = PooledOptions(instruction="judge the fox")
    (folder / "chat_template.jinja").write_text(PAIR)
    assert "j ##u ##d ##g ##e the fox" in llm.get_tokenizer().decode(
        llm.engine.input_processor.encode_pooled("fox", "dog", instructed)
    )


def test_the_longer_text_of_a_pair_is_cut_as_by_the_library(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_model(tmp_path, "bert-score", {}, {}, "")
    llm, oracle = load(folder), AutoTokenizer.from_pretrained(str(folder))
    for first, second in [
        (TEXTS[0], TEXTS[5]),
        (TEXTS[5], TEXTS[0]),
        (TEXTS[1], TEXTS[2]),
        ("", TEXTS[5]),
        ("fox", "dog"),
    ]:
        for most in range(4, 40):
            for side in ("right", "left"):
                oracle.truncation_side = side
                expected = oracle(first, second, truncation=True, max_length=most)
                options = PooledOptions(most, side)
                found = llm.engine.input_processor.encode_pooled(first, second, options)
                types = [300 * kind for kind in expected["token_type_ids"]]
                assert found == np.add(expected["input_ids"], types).tolist(), (first, second, most, side)


def test_prompts_that_are_not_pooled_need_texts(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", [pooling(include_prompt=False)], **PROMPT)
    with pytest.raises(RequestError, match="input must be text: this model leaves the tokens of its prompt out"):
        load(folder).engine.input_processor.check_pooled([5, 6])


REFUSED: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("1_Pooling/config.json", {"pooling_mode": "topk"}, r"pooling_mode must be of cls, max, .*, got 'topk'"),
    (
        "1_Pooling/config.json",
        {"embedding_dimension": 32},
        "embedding_dimension is 32, which is not supported: rows have 64",
    ),
    ("1_Pooling/config.json", {"temperature": 2}, "temperature is 2, and the reader of modules does not declare"),
    ("2_Dense/config.json", {"out_features": 7}, r"2_Dense/model.safetensors: has tensors of the shapes .* requires"),
    (
        "2_Dense/config.json",
        {"activation_function": "torch.nn.modules.activation.Softmax"},
        "supported of torch.nn: CELU,",
    ),
    ("2_Dense/config.json", {"activation_function": "my.Activation"}, "is 'my.Activation', which is not supported"),
    (
        "2_Dense/config.json",
        {"module_output_name": "token_embeddings"},
        "has a module Dense from sentence_embedding to",
    ),
    (
        "config_sentence_transformers.json",
        {"default_prompt_name": "x"},
        "is 'x', and prompts has no text with this name",
    ),
    (
        "config_sentence_transformers.json",
        {"default_prompt_name": ["x"], "prompts": {"x": ""}},
        r"is \['x'\], and prompts",
    ),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
    ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, "model_type=CrossEncoder needs scores"),
    ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim must be an integer"),
    ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}, "similarity_fn_name is 'maxsim'"),
    ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length must be an integer"),
    ("sentence_bert_config.json", {"config_kwargs": {"num_hidden_layers": 1}}, "config_kwargs.num_hidden_layers is 1"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
    (
        "sentence_bert_config.json",
        {"modality_config": {"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}}},
        "modality_config.text.method_output_name is",
    ),
    (
        "sentence_bert_config.json",
        {"modality_config": {"message": {"method": "forward", "method_output_name": "last_hidden_state"}}},
        "its texts cannot be rendered: messages: this model has no chat template",
    ),
    (
        "sentence_bert_config.json",
        {"processing_kwargs": {"text": {"truncation": "only_first"}}},
        "truncation is 'only_f",
    ),
    ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length must be a number"),
    ("config.json", {"is_decoder": True}, "is_decoder"),
]


def test_settings_that_are_not_supported(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", [pooling(), dense(SIZE, 8)])

    @loop_over(("file", "content", "message"), REFUSED)
    def check(file: str, content: dict[str, Any], message: str) -> None:
        before = (folder / file).read_text()
        edit_json(folder / file, **content)
        try:
            with pytest.raises(ModelLoadError, match=message):
                load(folder)
        finally:
            (folder / file).write_text(before)

    check()


@loop_over(
    ("change", "message"),
    [
        (lambda modules: modules[1].update(type="sentence_transformers.base.modules.router.Router"), "module Router"),
        (lambda modules: modules[1].update(path="../1_Pooling"), "path is '../1_Pooling', which must be below"),
        (lambda modules: modules.pop(0), "must begin with the only Transformer or StaticEmbedding"),
        (lambda modules: modules.pop(), "computes token_embeddings of 64 values, and model_type=SentenceTransformer"),
        (lambda modules: modules.append(modules[1]), "has a module Pooling whose input is not the states of tokens"),
        (lambda modules: modules[0].update(path="0_BERT"), "has the Transformer in '0_BERT'"),
    ],
)
def test_modules_that_are_not_supported(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    folder = write_modules(reset(tmp_path / "model"), [pooling()])
    modules = json.loads((folder / "modules.json").read_text())
    change(modules)
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_pickled_modules_are_not_opened(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", [pooling(), dense(SIZE, 8)])
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"2_Dense/model.safetensors: is missing; convert the pickled weights"):
        load(folder)


def test_settings_without_an_effect_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_modules(tmp_path / "model", [pooling()], prompts={"query": "query: "})
    edit_json(folder / "sentence_bert_config.json", unpad_inputs=False, query_length=32)
    edit_json(folder / "config_sentence_transformers.json", requirements={"x": "1"})
    with caplog.at_level(logging.INFO, "chairlift"):
        load(folder)
    assert "has no effect on vectors and scores: unpad_inputs, query_length" in caplog.text
    assert "has no effect on vectors and scores: requirements" in caplog.text
    assert "the prompts 'query' are not added: write them before the texts" in caplog.text
