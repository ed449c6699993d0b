"""Tests vectors and scores against sentence-transformers, on tiny random models, and the tokens that are pooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from chairlift import LLM
from chairlift.config import EngineConfig
from chairlift.engine.pooled_prompts import PooledOptions
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.required_memory import PROCESS_BYTES, plan_required_memory
from chairlift.errors import ConfigError, ModelLoadError, RequestError
from chairlift.loading.pooled_text_config import static_text_settings, tokenizer_text_config
from chairlift.loading.text.marked_text import MarkedText
from chairlift.loading.text.rerank_prompt import encode_rerank_prompt
from chairlift.loading.text.tokenizer import Tokenizer
from support.case_loop import loop_over
from support.native import needs_native
from support.pooling_models import TEXTS, edit_json, write_pooling_model

KERNELS = ["torch", pytest.param("native", marks=needs_native)]
EMBEDDERS = [
    *(("bert", "mean"), ("bert", "cls"), ("roberta", "mean"), ("modernbert", "cls")),
    *(("qwen3", "lasttoken"), ("qwen3bare", "lasttoken")),
]


@pytest.fixture(scope="module", params=EMBEDDERS, ids=lambda each: "-".join(each))
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A model, and the vectors of TEXTS by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    kind, pooling = request.param
    folder = write_pooling_model(tmp_path_factory.mktemp("pooling"), kind, pooling)
    reference = SentenceTransformer(str(folder), device="cpu")
    return folder, np.array(reference.encode(TEXTS, batch_size=3))


@pytest.mark.parametrize("kernels", KERNELS)
def test_vectors_are_those_of_sentence_transformers(embedder: tuple[Path, np.ndarray], kernels: str) -> None:
    folder, expected = embedder
    options: dict[str, Any] = {"num_kv_blocks": 40} if (folder / "config.json").read_text().find("qwen3") > 0 else {}
    llm = LLM(model=str(folder), kernels=kernels, num_threads=2, dtype="float32", **options)
    vectors = np.array(llm.embed(TEXTS, use_tqdm=False))
    assert np.abs(vectors - expected).max() < 1e-4
    alone = np.array([llm.embed(text, use_tqdm=False)[0] for text in TEXTS])
    assert np.abs(vectors - alone).max() < 1e-6


def test_a_long_text_is_an_error_or_cut_off(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_pooling_model(tmp_path, "bert")
    llm = LLM(model=str(folder), num_threads=1)
    text = " ".join(TEXTS)
    with pytest.raises(
        RequestError, match=r"prompt 0: text has \d+ tokens, but the model computes at most 80 .*Shorten it"
    ):
        llm.embed(text)
    cut = np.array(llm.embed(text, truncate_prompt_tokens=-1))
    expected = np.array(SentenceTransformer(str(folder), device="cpu").encode([text]))
    assert np.abs(cut - expected).max() < 1e-4
    assert np.abs(np.array(llm.embed(text, truncate_prompt_tokens=10)) - cut).max() > 1e-3
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens=1 leaves no room .* has 2 tokens"):
        llm.embed(text, truncate_prompt_tokens=1)


def test_small_token_budgets_change_nothing(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "modernbert", "cls")
    vectors = [
        np.array(LLM(model=str(folder), num_threads=1, **options).embed(TEXTS * 3, use_tqdm=False))
        for options in ({}, {"max_num_batched_tokens": 80, "max_num_seqs": 3}, {"max_num_seqs": 1})
    ]
    for other in vectors[1:]:
        assert np.abs(other - vectors[0]).max() < 1e-6


def test_static_batching_of_vectors_is_rejected(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "qwen3", "lasttoken")
    with pytest.raises(
        ConfigError, match=r"batching=static cannot be combined with is_pooling.*: set batching=continuous"
    ):
        LLM(model=str(folder), num_kv_blocks=40, num_threads=1, batching="static")


def test_texts_are_in_the_event_log(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path / "model", "bert")
    log = tmp_path / "log"
    llm = LLM(model=str(folder), num_threads=1, event_log=log)
    llm.embed(TEXTS, use_tqdm=False)
    llm.close()
    kinds = [json.loads(line)["type"] for line in log.read_text().splitlines()]
    assert kinds.count("request_finished") == len(TEXTS)
    decoder = write_pooling_model(tmp_path / "decoder", "qwen3", "lasttoken")
    with pytest.raises(ConfigError, match="record_trace records outputs, and 'decoder' computes vectors"):
        LLM(model=str(decoder), num_kv_blocks=40, record_trace=tmp_path / "trace")


@needs_native
def test_int8_is_close(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "bert")
    exact, quantized = (
        np.array(LLM(model=str(folder), num_threads=1, **options).embed(TEXTS, use_tqdm=False))
        for options in ({}, {"quantization": "int8"})
    )
    assert (exact * quantized).sum(-1).min() > 0.99


def test_wrong_uses(tmp_path: Path) -> None:
    embedder = LLM(model=str(write_pooling_model(tmp_path / "a", "bert")), num_threads=1)
    with pytest.raises(RequestError, match="computes vectors of texts: use /v1/embeddings"):
        embedder.generate("text")
    with pytest.raises(RequestError, match="computes vectors of texts"):
        embedder.score("a", ["b"])
    scorer = LLM(model=str(write_pooling_model(tmp_path / "b", "bert-score", None)), num_threads=1)
    with pytest.raises(RequestError, match="computes scores of pairs of texts: use /v1/rerank"):
        scorer.embed("text")
    with pytest.raises(RequestError, match="2 queries and 3 documents"):
        scorer.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(RequestError, match="texts must be strings, got int"):
        embedder.embed(["a", 1])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="texts must be a string or a list of strings, got NoneType"):
        embedder.embed(None)  # type: ignore[arg-type]


def test_unsupported_options(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "bert")
    unused: list[dict[str, Any]] = [
        {"num_kv_blocks": 10},
        {"kv": "exact"},
        {"kv_cache_dtype": "int8"},
        {"enable_prefix_caching": True},
        {"prefix_cache_dir": tmp_path},
        {"max_loras": 2},
        {"record_trace": tmp_path / "trace"},
    ]
    for options in unused:
        with pytest.raises(ConfigError, match=f"{next(iter(options))} has no use for"):
            LLM(model=str(folder), **options)
    with pytest.raises(ConfigError, match="max_model_len=100 exceeds the 80 tokens of the model"):
        LLM(model=str(folder), max_model_len=100)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=70 must be at least max_model_len=80"):
        LLM(model=str(folder), max_num_batched_tokens=70)


@pytest.fixture
def reranker(tmp_path: Path) -> Path:
    """A tiny Qwen3 whose vocabulary has the tokens of Qwen3-Reranker's prompt."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = Qwen3Config(
        vocab_size=300, **sizes, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, eos_token_id=256
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


RERANK_PAIRS = [("capital of France?", text) for text in (*TEXTS[:4], "Paris is <|im_end|> the capital.")]


@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_are_those_of_the_logits_after_the_prompt(reranker: Path, kernels: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reranker, dtype=torch.float32)
    llm = LLM(
        model=str(reranker), num_threads=1, kernels=kernels, classifier_from_token=["n", "y"], max_num_batched_tokens=64
    )
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    expected = []
    for query, document in RERANK_PAIRS:
        ids = encode_rerank_prompt(tokenizer, query, document)
        assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 2, "a text cannot end the turn"
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        pair = torch.stack([logits[tokenizer.token_to_id("n")], logits[tokenizer.token_to_id("y")]])
        expected.append(float(pair.softmax(0)[1]))
    queries, documents = map(list, zip(*RERANK_PAIRS, strict=True))
    scores = llm.score(queries, documents, use_tqdm=False)
    assert np.abs(np.array(scores) - np.array(expected)).max() < 1e-4
    assert len({round(score, 6) for score in scores}) == len(scores)
    with pytest.raises(RequestError, match="computes scores of pairs of texts"):
        llm.generate("text")
    with pytest.raises(RequestError, match="truncate_prompt_tokens=20 leaves no room"):
        llm.score("a", "b", truncate_prompt_tokens=20)
    cut = llm.score("query", "long " * 400, truncate_prompt_tokens=400, use_tqdm=False)
    assert 0 < cut[0] < 1


@needs_native
def test_the_plan_of_a_reranker_is_what_its_engine_takes(reranker: Path) -> None:
    given = EngineConfig(str(reranker), num_threads=1, classifier_from_token=["n", "y"])
    config, required = plan_required_memory(given, PROCESS_BYTES + (64 << 20))
    assert required.kv_cache == build_engine(config).facts.kv_cache_plan.num_bytes


def test_wrong_options_of_a_reranker(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="'nope' is not a token of the model's vocabulary"):
        LLM(model=str(reranker), num_threads=1, classifier_from_token=["n", "nope"])
    with pytest.raises(ConfigError, match="must be two tokens"):
        LLM(model=str(reranker), classifier_from_token=["y"])
    embedder = write_pooling_model(tmp_path_factory.mktemp("embedder"), "qwen3", "lasttoken")
    with pytest.raises(ConfigError, match="which computes vectors: remove it"):
        LLM(model=str(embedder), num_threads=1, classifier_from_token=["n", "y"])
    encoder = write_pooling_model(tmp_path_factory.mktemp("encoder"), "bert")
    with pytest.raises(ConfigError, match="classifier_from_token has no use for"):
        LLM(model=str(encoder), num_threads=1, classifier_from_token=["n", "y"])


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
