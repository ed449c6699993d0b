"""The request and response bodies of embeddings (OpenAI), scores (vLLM) and reranking (Jina and Cohere, as in vLLM)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from chairlift.server.protocol.base import MAX_PROMPTS, RequestBody, advisory, omitted_if_null
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
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class RerankedText(BaseModel):
    text: str


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: RerankedText | None = omitted_if_null()


class RerankResponse(BaseModel):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: dict[str, Any] = Field(description="The version of Cohere's API, and the tokens in its form.")
