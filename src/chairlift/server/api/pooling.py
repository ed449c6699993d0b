"""The endpoints of vectors and scores: /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
import math
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Final, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.pooling import POOLING_PARAMS, TASKS, check_task, pooled_values, sigmoid, truncate_vector
from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import RequestError
from chairlift.outputs import RequestOutput
from chairlift.server.api.serving import ApiCall, CallServing
from chairlift.server.api.stream_chunks import encode
from chairlift.server.preparation.request_plan import RequestPlan
from chairlift.server.protocol.pooling import (
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    RerankedText,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
)
from chairlift.server.protocol.sampling import CallFields

PoolingBody = TypeVar("PoolingBody", bound=CallFields)

VALUES_PER_TOKEN: Final = 16
"""Values of vectors that take as long to write as a token of text."""


def plan_embeddings(engine: ServedEngine, body: EmbeddingRequest) -> RequestPlan:
    """Plan a call of /v1/embeddings; raises RequestError."""
    check_task(engine.facts, "embed")
    size = 0 if engine.facts.pooling is None else engine.facts.pooling.size
    if body.dimensions is not None and body.dimensions > size:
        raise RequestError(f"dimensions={body.dimensions} exceeds the {size} values of a vector", "dimensions")
    texts = [body.input] if isinstance(body.input, str) else body.input
    if isinstance(texts[0], int):
        texts = [texts]
    return RequestPlan([(None, _token_ids(engine, text, body)) for text in texts], POOLING_PARAMS, "input")


def _token_ids(engine: ServedEngine, text: str | list[int] | int, body: CallFields) -> list[int]:
    if isinstance(text, str):
        return engine.input_processor.encode_pooled(text, None, body.truncate_prompt_tokens)
    assert isinstance(text, list), "the type of the field"
    return engine.input_processor.check_pooled(text, body.truncate_prompt_tokens)


def plan_score(engine: ServedEngine, body: ScoreRequest) -> RequestPlan:
    """Plan a call of /v1/score; raises RequestError."""
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(firsts) not in (1, len(seconds)):
        raise RequestError(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: text_1 must be one text, or as many", "text_1"
        )
    return _plan_pairs(engine, firsts, seconds, body)


def plan_rerank(engine: ServedEngine, body: RerankRequest) -> RequestPlan:
    """Plan a call of /v1/rerank; raises RequestError."""
    return _plan_pairs(engine, [body.query], body.texts(), body)


def _plan_pairs(engine: ServedEngine, firsts: list[str], seconds: list[str], body: CallFields) -> RequestPlan:
    """The prompts of pairs: both texts in one for a cross-encoder, otherwise all first and then all second texts."""
    pooling = engine.facts.pooling
    if pooling is None:
        raise RequestError(f"model {engine.facts.model_name!r} {TASKS[None]}", "model")
    encode_pooled, most = engine.input_processor.encode_pooled, body.truncate_prompt_tokens
    if pooling.task == "score":
        pairs = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
        prompts = [encode_pooled(first, second, most) for first, second in pairs]
    else:
        prompts = [encode_pooled(text, None, most) for text in (*firsts, *seconds)]
    return RequestPlan([(None, token_ids) for token_ids in prompts], POOLING_PARAMS, "input")


class PoolingServing(CallServing[PoolingBody, RequestPlan]):
    """The base class of endpoints that return vectors or scores."""

    @abstractmethod
    def response(self, call: ApiCall[PoolingBody, RequestPlan], outputs: list[RequestOutput]) -> BaseModel:
        """The body of the response."""

    async def respond(self, body: PoolingBody, request: Request, plan: RequestPlan | None = None) -> Response:
        if plan is None:
            request.app.state.admission.check_token_rate(request.state.key)
            plan = await self.plan(body, request)
        call = await self._start(body, plan, request)
        try:
            outputs = await asyncio.gather(*(generation.collect() for generation in call.generations))
        finally:
            call.close()
        for output in outputs:
            call.usage.add(output)
        size = sum(len(output.pooled or b"") for output in outputs) // VALUES_PER_TOKEN
        content = await self._write(call, size, self._response_json, call, list(outputs))
        request.state.ignored = body.ignored_fields()
        return Response(content, media_type="application/json")

    def _response_json(self, call: ApiCall[PoolingBody, RequestPlan], outputs: list[RequestOutput]) -> bytes:
        return encode(self.response(call, outputs).model_dump())

    def usage(self, call: ApiCall[PoolingBody, RequestPlan]) -> EmbeddingUsage:
        """The token counts of a call."""
        return EmbeddingUsage(prompt_tokens=call.usage.prompt_tokens, total_tokens=call.usage.prompt_tokens)


class EmbeddingServing(PoolingServing[EmbeddingRequest]):
    """POST /v1/embeddings."""

    id_prefix = "embd-"

    def response(self, call: ApiCall[EmbeddingRequest, RequestPlan], outputs: list[RequestOutput]) -> BaseModel:
        vectors = [truncate_vector(output.pooled or b"", call.body.dimensions) for output in outputs]
        is_base64 = call.body.encoding_format == "base64"
        data = [
            EmbeddingData.model_construct(
                index=index,
                embedding=base64.b64encode(vector).decode() if is_base64 else array("f", vector).tolist(),
            )
            for index, vector in enumerate(vectors)
        ]
        return EmbeddingResponse.model_construct(data=data, model=call.model, usage=self.usage(call))


def pair_scores(outputs: Sequence[RequestOutput], num_pairs: int) -> list[float]:
    """The scores of pairs: those of a cross-encoder from 0 to 1, or the cosines of the vectors of both texts."""
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


class ScoreServing(PoolingServing[ScoreRequest]):
    """POST /v1/score."""

    id_prefix = "score-"

    def response(self, call: ApiCall[ScoreRequest, RequestPlan], outputs: list[RequestOutput]) -> BaseModel:
        num_pairs = 1 if isinstance(call.body.text_2, str) else len(call.body.text_2)
        data = [ScoreData(index=index, score=score) for index, score in enumerate(pair_scores(outputs, num_pairs))]
        return ScoreResponse(id=call.id, created=call.created, model=call.model, data=data, usage=self.usage(call))


class RerankServing(PoolingServing[RerankRequest]):
    """POST /v1/rerank."""

    id_prefix = "rerank-"

    def response(self, call: ApiCall[RerankRequest, RequestPlan], outputs: list[RequestOutput]) -> BaseModel:
        body = call.body
        texts = body.texts()
        scores = pair_scores(outputs, len(texts))
        ranked = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=RerankedText(text=texts[index]) if body.return_documents else None,
            )
            for index in ranked
        ]
        return RerankResponse(id=call.id, model=call.model, results=results, usage=self.usage(call))
