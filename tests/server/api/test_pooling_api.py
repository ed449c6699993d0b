"""Tests /v1/embeddings, /v1/score and /v1/rerank with clients over a socket."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift import LLM, AsyncLLM
from chairlift.outputs import RequestOutput
from chairlift.server.api.engine_call import LARGE_OUTPUT, output_size
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.protocol.base import MAX_TEXTS
from support.byte_tokenizer import write_byte_tokenizer
from support.case_loop import loop_over
from support.pooling_models import TEXTS, edit_json, write_pooling_model
from support.running_server import ON_CLUSTER, RunningServer, run_server


@pytest.fixture(scope="module")
def embedder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pooling_model(tmp_path_factory.mktemp("embedder"), "bert", "cls")


@pytest.fixture(scope="module")
def scorer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pooling_model(tmp_path_factory.mktemp("scorer"), "bert-score", None)


@pytest.fixture(scope="module")
def embedder(embedder_folder: Path) -> Iterator[RunningServer]:
    with run_server(AsyncLLM(model=str(embedder_folder), num_threads=1), "embedder") as running:
        yield running


@pytest.fixture(scope="module")
def scorer(scorer_folder: Path) -> Iterator[RunningServer]:
    with run_server(AsyncLLM(model=str(scorer_folder), num_threads=1), "scorer") as running:
        yield running


def test_the_openai_client_gets_vectors(embedder: RunningServer, embedder_folder: Path) -> None:
    expected = np.array(LLM(model=str(embedder_folder), num_threads=1).embed(TEXTS, use_tqdm=False))
    client = embedder.client()
    with ThreadPoolExecutor(4) as pool:
        calls: list[dict[str, Any]] = [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"user": "x"}]
        found = list(pool.map(lambda o: client.embeddings.create(model="embedder", input=TEXTS, **o), calls))
    for index, response in enumerate(found):
        vectors: Any = [each.embedding for each in response.data]
        if index == 2:
            vectors = [np.frombuffer(base64.b64decode(each), dtype=np.float32) for each in vectors]
        assert np.abs(np.array(vectors) - expected).max() < 1e-6
        assert [each.index for each in response.data] == list(range(len(TEXTS)))
        assert response.usage.prompt_tokens == response.usage.total_tokens > len(TEXTS)
    (single,) = client.embeddings.create(model="embedder", input=TEXTS[0]).data
    assert np.abs(np.array(single.embedding) - expected[0]).max() < 1e-6
    assert embedder.llm.num_unfinished == 0


def test_token_ids_and_dimensions(embedder: RunningServer) -> None:
    client = embedder.client()
    tokens = embedder.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    inputs: list[Any] = [TEXTS[0], tokens, [tokens]]
    vectors = [client.embeddings.create(model="embedder", input=each).data[0].embedding for each in inputs]
    assert vectors[0] == vectors[1] == vectors[2]
    short = np.array(client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=16).data[0].embedding)
    expected = np.array(vectors[0][:16])
    assert np.abs(short - expected / np.linalg.norm(expected)).max() < 1e-6


def test_a_large_body_is_prepared_elsewhere(embedder: RunningServer) -> None:
    texts = [f"{TEXTS[0]} {number}" for number in range(1000)]
    assert sum(map(len, texts)) > LARGE_BODY
    found = embedder.client().embeddings.create(model="embedder", input=texts).data
    alone = embedder.client().embeddings.create(model="embedder", input=texts[-1]).data[0].embedding
    assert np.abs(np.array(found[-1].embedding) - np.array(alone)).max() < 1e-6


def test_scores_and_reranking(scorer: RunningServer, scorer_folder: Path) -> None:
    query, documents = TEXTS[0], TEXTS[1:5]
    expected = LLM(model=str(scorer_folder), num_threads=1).score(query, documents, use_tqdm=False)
    scores = scorer.post("/v1/score", {"text_1": query, "text_2": documents}).json()
    assert np.abs(np.array([each["score"] for each in scores["data"]]) - expected).max() < 1e-6
    assert scorer.post("/score", {"text_1": query, "text_2": documents[0]}).json()["data"][0]["score"] == pytest.approx(
        expected[0]
    )
    pairwise = scorer.post("/v1/score", {"text_1": [query] * 4, "text_2": documents}).json()["data"]
    assert [each["score"] for each in pairwise] == pytest.approx([each["score"] for each in scores["data"]], abs=1e-6)
    ranked = scorer.post("/v1/rerank", {"query": query, "documents": documents, "top_n": 2}).json()["results"]
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [each["index"] for each in ranked] == order[:2]
    assert [each["document"]["text"] for each in ranked] == [documents[index] for index in order[:2]]
    body = {"query": query, "documents": [{"text": text} for text in documents], "return_documents": False}
    every = scorer.post("/rerank", body).json()["results"]
    assert [each["index"] for each in every] == order
    assert all("document" not in each for each in every)


def test_reranking_with_the_client_of_cohere(scorer: RunningServer) -> None:
    """The body is that of `ClientV2.rerank` of cohere 7.3.1, whose types accept the answer."""
    query, documents = TEXTS[0], TEXTS[1:5]
    body = {"model": "scorer", "query": query, "documents": documents, "top_n": 2, "max_tokens_per_doc": 4096}
    expected = scorer.post("/v1/rerank", {"query": query, "documents": documents, "top_n": 2}).json()
    answer = scorer.post("/v2/rerank", body)
    assert answer.status_code == 200, answer.text
    order = [each["index"] for each in expected["results"]]
    assert [each["index"] for each in answer.json()["results"]] == order
    assert answer.json()["meta"]["api_version"] == {"version": "2"}
    assert answer.json()["meta"]["tokens"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    more = scorer.post("/v2/rerank", {**body, "priority": 3, "relevant_spans": {"mode": "enabled"}})
    assert more.headers["x-chairlift-ignored"] == "relevant_spans, priority"
    assert [each["index"] for each in more.json()["results"]] == order
    nulls = dict.fromkeys(("top_n", "max_tokens_per_doc", "relevant_spans", "priority", "return_documents"))
    assert len(scorer.post("/v2/rerank", {**body, **nulls}).json()["results"]) == 4


def test_documents_are_cut_to_a_number_of_tokens(scorer: RunningServer) -> None:
    documents = [TEXTS[1], TEXTS[1] + " and more" * 20]
    body = {"query": TEXTS[0], "documents": documents}
    num_tokens = scorer.post("/tokenize", {"prompt": TEXTS[1], "add_special_tokens": False}).json()["count"]
    first, second = scorer.post("/v1/rerank", {**body, "max_tokens_per_doc": num_tokens}).json()["results"]
    assert first["relevance_score"] == pytest.approx(second["relevance_score"], abs=1e-6)
    assert {first["document"]["text"], second["document"]["text"]} == set(documents)


def test_scores_of_a_model_of_vectors_are_cosines(embedder: RunningServer, embedder_folder: Path) -> None:
    vectors = np.array(LLM(model=str(embedder_folder), num_threads=1).embed(TEXTS, use_tqdm=False))
    cosines = vectors[1:] @ vectors[0]
    scores = embedder.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
    assert np.abs(np.array([each["score"] for each in scores]) - cosines).max() < 1e-5
    ranked = embedder.post("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()["results"]
    assert [each["index"] for each in ranked] == np.argsort(-cosines).tolist()


def test_more_texts_than_requests_may_be_queued(embedder: RunningServer, scorer: RunningServer) -> None:
    """OpenAI's client, Chroma and LanceDB send all texts in one call."""
    data = embedder.client().embeddings.create(model="embedder", input=TEXTS[:5] * 410).data
    assert [each.index for each in data] == list(range(2050))
    assert np.abs(np.array(data[-1].embedding) - np.array(data[4].embedding)).max() < 1e-6
    results = scorer.post("/v1/rerank", {"query": "fox", "documents": ["dog", "lazy"] * 1025}).json()["results"]
    assert len(results) == 2050
    for server, path, body, field in (
        (embedder, "/v1/embeddings", {"input": ["a"] * (MAX_TEXTS + 1)}, "input must have at most 8192 entries"),
        (scorer, "/v1/rerank", {"query": "a", "documents": ["b"] * (MAX_TEXTS + 1)}, "documents must have at most"),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, field in answer.text) == (400, True), answer.text


def test_many_scores_are_written_on_a_thread() -> None:
    outputs = [RequestOutput("x", None, [5, 6], [], True, pooled=bytes(8))] * (LARGE_OUTPUT + 1)
    assert sum(map(output_size, outputs)) > LARGE_OUTPUT
    assert output_size(RequestOutput("x", None, [5] * 1600, [], True, pooled=bytes(8))) > 100


def test_the_tokens_of_a_call_are_limited(
    embedder: RunningServer, scorer: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.server.api.pooling.MAX_POOLED_TOKENS", 200)
    assert embedder.post("/v1/embeddings", {"input": ["fox"] * 3}).status_code == 200
    error = embedder.post("/v1/embeddings", {"input": ["fox"] * 4}).json()["error"]
    assert error["param"] == "input"
    assert "input: the first 4 texts have more than 200 tokens together" in error["message"]
    error = embedder.post("/v1/score", {"text_1": "a", "text_2": ["fox"] * 3}).json()["error"]
    assert (error["param"], "the first 4 texts" in error["message"]) == ("text_2", True)
    long = {"query": "fox " * 900, "documents": ["dog"] * 3, "truncate_prompt_tokens": 9}
    assert scorer.post("/v1/rerank", {**long, "query": "fox"}).status_code == 200
    error = scorer.post("/v1/rerank", long).json()["error"]
    assert "the first 1 texts have more than 200 tokens" in error["message"], "a query is read for each document"


def test_equal_documents_have_equal_scores(embedder: RunningServer, scorer: RunningServer) -> None:
    documents = [*TEXTS, *TEXTS[::-1]] * 20
    equal = [[index for index, text in enumerate(documents) if text == each] for each in TEXTS]
    for server in (embedder, scorer):
        scores = server.post("/v1/score", {"text_1": "fox and dog", "text_2": documents}).json()["data"]
        assert all(len({scores[index]["score"] for index in group}) == 1 for group in equal)
        ranked = server.post("/v1/rerank", {"query": "fox and dog", "documents": documents}).json()["results"]
        order = [each["index"] for each in ranked]
        assert all([index for index in order if index in group] == group for group in equal)


def test_fields_of_vllm(embedder: RunningServer, scorer: RunningServer) -> None:
    def vector(**fields: Any) -> Any:
        answer = embedder.post("/v1/embeddings", fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"]

    text, tokens = TEXTS[0], embedder.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    neutral = {"use_activation": True, "padding": "do_not_pad", "endianness": "little", "embed_dtype": "float16"}
    whole = vector(input=text)
    assert vector(input=text, **neutral) == whole
    assert vector(input=text, add_special_tokens=False) == vector(input=tokens[1:-1]) != whole
    cut = {"truncate_prompt_tokens": 5, "truncation_side": "left"}
    assert vector(input=text, **cut) == vector(input=[tokens[0], *tokens[-4:]])
    assert vector(input=tokens, **cut) == vector(input=tokens[-5:])
    for dtype, order in (("float16", "little"), ("float16", "big"), ("float32", "big")):
        given = vector(input=text, encoding_format="base64", embed_dtype=dtype, endianness=order)
        kind = np.dtype(dtype).newbyteorder(">" if order == "big" else "<")
        assert np.abs(np.frombuffer(base64.b64decode(given), kind) - np.array(whole)).max() < 1e-3
    short = np.frombuffer(
        base64.b64decode(vector(input=text, encoding_format="base64", embed_dtype="bfloat16")), np.uint16
    )
    expected = torch.tensor(whole).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (short == expected).all()
    pair = {"text_1": TEXTS[0], "text_2": TEXTS[1]}
    number, score = (
        scorer.post("/v1/score", {**pair, "use_activation": uses}).json()["data"][0]["score"] for uses in (False, True)
    )
    assert score == pytest.approx(1 / (1 + np.exp(-number)), abs=1e-6)
    ignored = scorer.post("/v1/score", {**pair, "instruction": "judge"})
    assert (ignored.status_code, ignored.headers["x-chairlift-ignored"]) == (200, "instruction")
    document = {"text": "fox", "title": "A", "score": 0.5}
    ranked = scorer.post("/v1/rerank", {"query": "dog", "documents": [document, "lazy"], "max_tokens_per_doc": 0})
    assert (ranked.status_code, ranked.headers["x-chairlift-ignored"]) == (200, "documents.score, documents.title")
    assert {"text": "fox"} in [each["document"] for each in ranked.json()["results"]]


PAIR: dict[str, Any] = {"text_1": "fox", "text_2": "dog"}


@loop_over(
    ("path", "body", "ignored"),
    [
        ("embeddings", {"input": "x", "embed_dtype": "float16", "endianness": "big"}, "embed_dtype, endianness"),
        ("embeddings", {"input": "x", "embed_dtype": "float16", "encoding_format": "base64"}, None),
        ("embeddings", {"input": [5], "add_special_tokens": True}, "add_special_tokens"),
        ("embeddings", {"input": [[5], [6]], "add_special_tokens": False}, "add_special_tokens"),
        ("embeddings", {"input": ["x"], "add_special_tokens": False}, None),
        ("embeddings", {"input": "x", "truncation_side": "left"}, "truncation_side"),
        ("embeddings", {"input": "x", "truncation_side": "left", "truncate_prompt_tokens": -1}, None),
        ("score", {**PAIR, "use_activation": False}, "use_activation"),
        ("score", {**PAIR, "use_activation": True}, None),
        ("score", {**PAIR, "instruction": "judge " * 9000}, "instruction"),
        ("rerank", {"query": "x", "documents": ["y"], "use_activation": False}, "use_activation"),
        ("rerank", {"query": "q", "documents": [{"text": "a", "\u6807": "x", "a\r\nb: c": "d", "b": ""}]}, None),
        (
            "rerank",
            {"query": "q", "documents": [{"text": "a", **{f"k{n}": 1 for n in range(10, 90)}}]},
            ", ".join(f"documents.k{n}" for n in range(10, 26)),
        ),
    ],
)
def test_fields_without_an_effect(embedder: RunningServer, path: str, body: dict[str, Any], ignored: str) -> None:
    answer = embedder.post(f"/v1/{path}", body)
    assert (answer.status_code, answer.headers.get("x-chairlift-ignored")) == (200, ignored), answer.text


def test_messages_have_vectors(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "qwen3", "lasttoken")
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}fox{% endif %}[SEP]")
    with run_server(AsyncLLM(model=str(folder), num_threads=1, num_kv_blocks=40), "embedder") as server:

        def vector(**fields: Any) -> Any:
            answer = server.post("/v1/embeddings", fields)
            return answer.json()["data"][0]["embedding"] if answer.status_code == 200 else answer.json()["error"]

        messages = [{"role": "user", "content": "the lazy dog"}]
        assert vector(messages=messages) == vector(input="user the lazy dog [SEP]", add_special_tokens=False)
        assert vector(messages=messages, add_special_tokens=True) == vector(input="user the lazy dog [SEP]")
        prompted = vector(messages=messages, add_generation_prompt=True)
        assert prompted == vector(input="user the lazy dog fox[SEP]", add_special_tokens=False)
        cut = {"truncate_prompt_tokens": 4}
        assert vector(messages=messages, **cut) == vector(
            input="user the lazy dog [SEP]", add_special_tokens=False, **cut
        )
        assert vector(messages=messages, input="x")["message"] == "send either input or messages"
        assert vector()["param"] == "input"
        assert "only allowed with messages" in vector(input="x", add_generation_prompt=True)["message"]


@pytest.mark.parametrize("kind", ["dot", "euclidean", "manhattan"])
def test_scores_of_vectors_follow_the_similarity_of_the_folder(kind: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_pooling_model(tmp_path, "bert", normalize=False)
    edit_json(folder / "config_sentence_transformers.json", similarity_fn_name=kind)
    model = SentenceTransformer(str(folder), device="cpu")
    expected = model.similarity(model.encode(TEXTS[:1]), model.encode(TEXTS[1:]))[0].numpy()
    with run_server(AsyncLLM(model=str(folder), num_threads=1), "embedder") as server:
        data = server.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
        # Distances are sums of differences in which float32 loses digits, so the error is not relative to them.
        np.testing.assert_allclose([each["score"] for each in data], expected, rtol=1e-5, atol=1e-5)
        whole, short = (
            np.array(server.post("/v1/embeddings", {"input": "fox", **fields}).json()["data"][0]["embedding"])
            for fields in ({}, {"dimensions": 16})
        )
        assert (short == whole[:16]).all(), "without a module Normalize vectors are not scaled"


def test_wrong_requests(embedder: RunningServer, scorer: RunningServer) -> None:
    long = " ".join(TEXTS)
    cases: list[tuple[RunningServer, str, dict[str, Any], str]] = [
        (embedder, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "use /v1/embeddings"),
        (embedder, "/v1/completions", {"prompt": "x"}, "computes vectors of texts: use /v1/embeddings"),
        (scorer, "/v1/embeddings", {"input": "x"}, "computes scores of pairs of texts: use /v1/rerank or /v1/score"),
        (embedder, "/v1/embeddings", {"input": long}, "but the model computes at most 80"),
        (embedder, "/v1/embeddings", {"input": []}, "input"),
        (embedder, "/v1/embeddings", {"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        (embedder, "/v1/embeddings", {"input": "a", "use_activation": False}, "use_activation"),
        (
            embedder,
            "/v1/embeddings",
            {"input": [TEXTS[0], ""], "dimensions": 65},
            "dimensions=65 exceeds the 64 values",
        ),
        (embedder, "/v1/embeddings", {"input": [[1, 100000]]}, "contains a token id outside 0..299"),
        (embedder, "/v1/embeddings", {"input": [5] * 90}, "input has 90 tokens, but the model computes at most 80"),
        (embedder, "/v1/embeddings", {"input": ["a", long]}, "input[1] has"),
        (embedder, "/v1/embeddings", {"input": "a" * 9000}, "max_model_len=80. Shorten it, or set truncate_prompt_tok"),
        (embedder, "/v1/score", {"text_1": "a", "text_2": ["b", long]}, "text_2[1] has"),
        (scorer, "/v1/rerank", {"query": "a", "documents": ["b", long]}, "documents[1] with query has"),
        (scorer, "/v1/rerank", {"query": "a" * 9000, "documents": ["b", "c"]}, "query is 9000 bytes long"),
        (scorer, "/v1/score", {"text_1": ["a", "b"], "text_2": ["c", long]}, "text_2[1] with text_1[1] has"),
        (embedder, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "must be at least 1, or -1"),
        (scorer, "/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 1"),
        (scorer, "/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ]
    for server, path, body, message in cases:
        answer = server.post(path, body)
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        assert message in error["message"]
        assert "bytes long" not in message or error["param"] == message.split()[0]
        assert error["param"] in (*body, "model")
    cut = embedder.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 80
    longer = embedder.post("/v1/embeddings", {"input": f"{long} " * 200, "truncate_prompt_tokens": -1}).json()
    assert longer["data"] == cut["data"], "a text of any length is cut off"
    tokens = embedder.post("/v1/embeddings", {"input": [5] * 90, "truncate_prompt_tokens": 7}).json()
    assert tokens["usage"]["prompt_tokens"] == 7


def test_a_model_that_generates_has_no_vectors(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(tiny_model_dir("llama", vocab_size=400), tmp_path / "model")
    write_byte_tokenizer(folder)
    with run_server(AsyncLLM(model=str(folder), num_kv_blocks=40, num_threads=1), "llama") as server:
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/score", {"text_1": "a", "text_2": "b"})):
            answer = server.post(path, body)
            assert answer.status_code == 400
            assert "generates text: use /v1/chat/completions" in answer.json()["error"]["message"]


@pytest.mark.skipif(ON_CLUSTER, reason="metrics have another label")
def test_metrics_and_explanations(embedder: RunningServer) -> None:
    import httpx

    embedder.client().embeddings.create(model="embedder", input=TEXTS * 20, extra_body={"request_id": "many"})
    explained = httpx.get(f"{embedder.url}/v1/requests/embd-many/explain").json()
    assert explained["num_sequences"] == 20 * len(TEXTS)
    assert len(explained["sequences"]) == 16, "the first ones are explained"
    text = httpx.get(f"{embedder.url}/metrics").text
    tokens = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert tokens == ['vllm:generation_tokens_total{engine="0",model_name="embedder"} 0.0']
    assert httpx.get(f"{embedder.url}/v1/engine").json()["plan"]["num_blocks"] == 0
