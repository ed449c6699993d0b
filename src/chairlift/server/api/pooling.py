"""The endpoints of vectors and scores, and their bodies: /v1/embeddings (OpenAI), /v1/score (vLLM) and /v1/rerank (Jina
and Cohere, as in vLLM)."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.pooling import POOLING_PARAMS, TASKS, check_task, pooled_values, sigmoid, truncate_vector
from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import RequestError
from chairlift.outputs import RequestOutput
from chairlift.server.api.endpoint import endpoint
from chairlift.server.api.engine_call import EngineCall
from chairlift.server.preparation.conversation import ModelPlanner, RequestPlan
from chairlift.server.protocol.base import MAX_PROMPTS, RequestBody, advisory, as_list, labelled_values, omitted_if_null
from chairlift.server.protocol.sampling import CallFields

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
Tokens = Annotated[list[int], Field(min_length=1)]


class EmbeddingRequest(CallFields):
    """The body of POST /v1/embeddings."""

    content_fields = ("input",)
    input: str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, description="Number of first values of each vector, scaled to length 1; for Matryoshka models."
    )


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(BaseModel):
    """A vector: numbers, or with `encoding_format` base64 their float32 bytes."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class ScoreRequest(CallFields):
    """The body of POST /v1/score: one first text for all second texts, or one for each."""

    text_1: str | Texts
    text_2: str | Texts


class ScoreData(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage


class RerankDocument(RequestBody):
    text: str


class RerankRequest(CallFields):
    """The body of POST /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: int | None = Field(None, ge=0, description="Number of results; null or 0 for all.")
    return_documents: bool = True
    # -- fields of Cohere --
    max_tokens_per_doc: int | None = Field(None, ge=1, description="The end of longer documents is not compared.")
    relevant_spans: dict[str, Any] | None = advisory("Has no effect: spans are not searched.", {"mode": "disabled"})

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = omitted_if_null()


class RerankResponse(BaseModel):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: dict[str, Any] = Field(description="The version of Cohere's API, and the tokens in its form.")


def _plan_pairs(
    engine: ServedEngine, firsts: list[str], seconds: list[str], body: CallFields, fields: tuple[str, str]
) -> RequestPlan:
    """The prompts of pairs: both texts in one for a cross-encoder, otherwise all first and then all second texts.

    Args:
        fields: the names of both texts in the body.
    """
    pooling = engine.facts.pooling
    if pooling is None:
        raise RequestError(f"the model {TASKS[None]}", "model")
    encode_pooled, most = engine.input_processor.encode_pooled, body.truncate_prompt_tokens
    first_texts, second_texts = labelled_values(fields[0], firsts), labelled_values(fields[1], seconds)
    if pooling.task == "score":
        pairs = zip(first_texts * (len(seconds) // len(firsts)), second_texts, strict=True)
        prompts = [encode_pooled(first, second, most, (label, other)) for (label, first), (other, second) in pairs]
    else:
        prompts = [encode_pooled(text, None, most, (label,)) for label, text in (*first_texts, *second_texts)]
    return RequestPlan([(None, token_ids) for token_ids in prompts], POOLING_PARAMS)


def _usage(call: EngineCall[Any, Any]) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=call.usage.prompt_tokens, total_tokens=call.usage.prompt_tokens)


class EmbeddingCall(EngineCall[EmbeddingRequest, RequestPlan]):
    id_prefix = "embd-"

    def response(self, outputs: list[RequestOutput]) -> EmbeddingResponse:
        data = []
        for index, output in enumerate(outputs):
            vector = truncate_vector(output.pooled or b"", self.body.dimensions)
            is_base64 = self.body.encoding_format == "base64"
            values = base64.b64encode(vector).decode() if is_base64 else array("f", vector).tolist()
            data.append(EmbeddingData.model_construct(index=index, embedding=values))
        return EmbeddingResponse.model_construct(data=data, model=self.model, usage=_usage(self))


def pair_scores(outputs: Sequence[RequestOutput], num_pairs: int) -> list[float]:
    """The scores of pairs: from 0 to 1 by a cross-encoder, or the cosines of the vectors of both texts."""
    rows = [pooled_values(output) for output in outputs]
    if all(len(row) == 1 for row in rows):
        return [sigmoid(row[0]) for row in rows]
    lengths = [max(math.hypot(*row), 1e-12) for row in rows]
    vectors = list(zip(rows, lengths, strict=True))
    firsts, seconds = vectors[:-num_pairs], vectors[-num_pairs:]
    if len(firsts) == 1:
        firsts *= num_pairs
    return [
        sum(map(mul, first, second)) / (length * other)
        for (first, length), (second, other) in zip(firsts, seconds, strict=True)
    ]


class ScoreCall(EngineCall[ScoreRequest, RequestPlan]):
    id_prefix = "score-"

    def response(self, outputs: list[RequestOutput]) -> ScoreResponse:
        scores = pair_scores(outputs, len(as_list(self.body.text_2)))
        data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreResponse(id=self.id, created=self.created, model=self.model, data=data, usage=_usage(self))


class RerankCall(EngineCall[RerankRequest, RequestPlan]):
    id_prefix = "rerank-"

    def response(self, outputs: list[RequestOutput]) -> RerankResponse:
        texts = self.body.texts()
        scores = pair_scores(outputs, len(texts))
        ranked = sorted(range(len(texts)), key=lambda index: -scores[index])[: self.body.top_n or None]
        results = [
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=RerankDocument(text=texts[index]) if self.body.return_documents else None,
            )
            for index in ranked
        ]
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": self.usage.prompt_tokens}}
        return RerankResponse(id=self.id, model=self.model, results=results, usage=_usage(self), meta=meta)


@endpoint("/v1/embeddings", EmbeddingResponse, EmbeddingCall)
def create_embeddings(planner: ModelPlanner, body: EmbeddingRequest) -> RequestPlan:
    """Compute the vectors of texts (OpenAI)."""
    engine = planner.engine
    check_task(engine.facts, "embed")
    size = engine.facts.model_config.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise RequestError(f"dimensions={body.dimensions} exceeds the {size} values of a vector", "dimensions")
    processor, most = engine.input_processor, body.truncate_prompt_tokens
    prompts = [
        processor.encode_pooled(text, None, most, (label,))
        if isinstance(text, str)
        else processor.check_pooled(text, most, label)
        for label, text in labelled_values("input", as_list(body.input))
    ]
    return RequestPlan([(None, token_ids) for token_ids in prompts], POOLING_PARAMS)


@endpoint("/v1/score", ScoreResponse, ScoreCall, ("/score",))
def create_scores(planner: ModelPlanner, body: ScoreRequest) -> RequestPlan:
    """Compute the scores of pairs of texts (vLLM)."""
    firsts, seconds = as_list(body.text_1), as_list(body.text_2)
    if len(firsts) not in (1, len(seconds)):
        message = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: text_1 must be one text, or as many"
        raise RequestError(message, "text_1")
    return _plan_pairs(planner.engine, firsts, seconds, body, ("text_1", "text_2"))


@endpoint("/v1/rerank", RerankResponse, RerankCall, ("/rerank", "/v2/rerank"))
def rerank_documents(planner: ModelPlanner, body: RerankRequest) -> RequestPlan:
    """Sort documents by their relevance for a query (Jina, Cohere)."""
    engine, texts = planner.engine, body.texts()
    if (most := body.max_tokens_per_doc) is not None:
        assert not isinstance(engine.tokenizer, NoTokenizer), "a model that computes scores has a tokenizer"
        texts = [engine.tokenizer.first_tokens(text, most) for text in texts]
    plan = _plan_pairs(engine, [body.query], texts, body, ("query", "documents"))
    has_effect = not body.priority or engine.input_processor.limits.supports_priority
    return plan if has_effect else replace(plan, ignored=("priority",))
