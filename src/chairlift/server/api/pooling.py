"""The endpoints of vectors and scores, and their bodies: /v1/embeddings (OpenAI), /v1/score (vLLM) and /v1/rerank (Jina
and Cohere, as in vLLM)."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.pooled_prompts import PooledOptions
from chairlift.engine.pooling import (
    POOLING_PARAMS,
    TASKS,
    check_task,
    converted_vector,
    pooled_values,
    similarity,
    truncate_vector,
)
from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import RequestError
from chairlift.models.pooling import PoolingConfig
from chairlift.outputs import RequestOutput
from chairlift.server.api.endpoint import endpoint
from chairlift.server.api.engine_call import EngineCall
from chairlift.server.preparation.conversation import ModelPlanner, RequestPlan
from chairlift.server.protocol.base import (
    MAX_MESSAGES,
    MAX_POOLED_TOKENS,
    MAX_TEXTS,
    ReceivedObject,
    advisory,
    as_list,
    labelled_values,
    omitted_if_null,
)
from chairlift.server.protocol.chat import MAX_NAMED_KEYS, ChatCompletionRequest, ChatMessage, keys_with_values
from chairlift.server.protocol.sampling import CallFields

COUNTED_TOKENS: Final = 64  # that a text counts at least, because each text is a request of its own
CHARACTERS_PER_TOKEN: Final = 16  # of a query or an instruction, even if it is cut off

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]
Tokens = Annotated[list[int], Field(min_length=1)]


class PooledFields(CallFields):
    """The fields that all endpoints of this module accept."""

    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side that `truncate_prompt_tokens` cuts off. Default: that of the model."
    )
    padding: Literal["do_not_pad"] | None = Field(None, description="Texts are never padded.")

    def ignored_fields(self) -> list[str]:
        is_whole = self.truncate_prompt_tokens is None and self.truncation_side is not None
        return super().ignored_fields() + ["truncation_side"] * is_whole

    def options(self, **others: Any) -> PooledOptions:
        return PooledOptions(self.truncate_prompt_tokens, self.truncation_side, **others)


class EmbeddingRequest(PooledFields):
    """The body of POST /v1/embeddings."""

    content_fields = ("input", "messages")
    input: str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Number of first values of each vector, for Matryoshka models; scaled to length 1 if the model "
        "normalizes its vectors.",
    )
    # -- fields of vLLM --
    add_special_tokens: bool | None = Field(None, description="Default: true for a text, false for messages.")
    embed_dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="The type in base64.")
    endianness: Literal["native", "little", "big"] = Field("native", description="The order of bytes in base64.")
    use_activation: Literal[True] | None = Field(None, description="Vectors are those of the modules of the model.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = Field(
        None, description="A conversation in place of `input`."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ignored_fields(self) -> list[str]:
        of_base64 = {"embed_dtype": "float32", "endianness": "native"} if self.encoding_format == "float" else {}
        names = (name for name, default in of_base64.items() if getattr(self, name) != default)
        return [*super().ignored_fields(), *names]

    def chat(self) -> ChatCompletionRequest | None:
        """The messages as a chat request, or None for `input`; raises RequestError."""
        if (self.input is None) == (self.messages is None):
            raise RequestError("send either input or messages", "input")
        names = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.messages is not None:
            return ChatCompletionRequest(messages=self.messages, **{"add_generation_prompt": False, **given})
        if given:
            name = next(iter(given))
            raise RequestError(f"{name} is only allowed with messages: leave it out", name)
        return None

    def written(self, vector: bytes) -> list[float] | str:
        """A vector (float32) in the form of the response."""
        if self.encoding_format == "float":
            return array("f", vector).tolist()
        return base64.b64encode(converted_vector(vector, self.embed_dtype, self.endianness == "big")).decode()


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


class ScoringFields(PooledFields):
    """The fields of vLLM that scores and reranking share."""

    use_activation: bool | None = Field(None, description="false: the numbers before the activation.")
    instruction: str | None = Field(None, description="Replaces the instruction of models that have one.")


class ScoreRequest(ScoringFields):
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


class RerankDocument(ReceivedObject):
    """A document, whose other fields have no effect."""

    text: str


class RerankRequest(ScoringFields):
    """The body of POST /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: int | None = Field(None, ge=0, description="Number of results; null or 0 for all.")
    top_k: None = Field(None, description="Use `top_n`.")
    return_documents: bool = True
    # -- fields of Cohere --
    max_tokens_per_doc: int | None = Field(
        None, ge=0, description="0: no limit. The end of longer documents is not compared."
    )
    relevant_spans: dict[str, Any] | None = advisory("Has no effect: spans are not searched.", {"mode": "disabled"})

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def ignored_fields(self) -> list[str]:
        objects = (document for document in self.documents if isinstance(document, RerankDocument))
        keys = {f"documents.{key}" for document in objects for key in keys_with_values(document.model_extra)}
        return super().ignored_fields() + sorted(keys)[:MAX_NAMED_KEYS]


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
    engine: ServedEngine, firsts: list[str], seconds: list[str], body: ScoringFields, fields: tuple[str, str]
) -> RequestPlan:
    """The prompts of pairs: both texts in one for a cross-encoder, otherwise all first and then all second texts.

    Args:
        fields: the names of both texts in the body.
    """
    pooling = engine.facts.pooling
    if pooling is None:
        raise RequestError(f"the model {TASKS[None]}", "model")
    instruction = body.instruction if pooling.reads_instruction else None
    encode, options = engine.input_processor.encode_pooled, body.options(instruction=instruction)
    num_repeated = len(instruction or "")
    first_texts, second_texts = labelled_values(fields[0], firsts), labelled_values(fields[1], seconds)
    if pooling.task == "score":
        num_repeated += len(firsts[0]) if len(firsts) == 1 else 0
        pairs = zip(first_texts * (len(seconds) // len(firsts)), second_texts, strict=True)
        prompts = (encode(first, second, options, (label, other)) for (label, first), (other, second) in pairs)
    else:
        prompts = (encode(text, None, options, (label,)) for label, text in (*first_texts, *second_texts))
    ignored = [] if instruction == body.instruction else ["instruction"]
    if body.use_activation is False and pooling.task == "embed":
        ignored.append("use_activation")
    if body.truncation_side == "left" and pooling.has_own_prompt:
        ignored.append("truncation_side")
    if body.priority and not engine.input_processor.limits.supports_priority and fields[0] == "query":
        ignored.append("priority")
    return _plan(prompts, fields[1], tuple(ignored), num_repeated)


def _plan(
    prompts: Iterable[list[int]], field: str, ignored: tuple[str, ...] = (), num_repeated: int = 0
) -> RequestPlan:
    """The plan of prompts, which are computed one after the other until the call has too many tokens.

    Args:
        num_repeated: the characters of a query and an instruction, which are read again for each prompt.
    """
    found, total, least = [], 0, max(COUNTED_TOKENS, num_repeated // CHARACTERS_PER_TOKEN)
    for token_ids in prompts:
        found.append(token_ids)
        total += max(len(token_ids), least)
        if total > MAX_POOLED_TOKENS:
            raise RequestError(
                f"{field}: the first {len(found)} texts have more than {MAX_POOLED_TOKENS} tokens together, the limit "
                f"of one call, where a text counts as at least {least}: send them in several calls",
                field,
            )
    return RequestPlan([(None, token_ids) for token_ids in found], POOLING_PARAMS, ignored=ignored)


def _usage(call: EngineCall[Any, Any]) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=call.usage.prompt_tokens, total_tokens=call.usage.prompt_tokens)


class EmbeddingCall(EngineCall[EmbeddingRequest, RequestPlan]):
    id_prefix = "embd-"

    def response(self, outputs: list[RequestOutput]) -> EmbeddingResponse:
        pooling = self.llm.engine.facts.pooling
        assert pooling is not None, "the model computes vectors"
        vectors = (truncate_vector(output.pooled or b"", self.body.dimensions, pooling) for output in outputs)
        values = map(self.body.written, vectors)
        data = [EmbeddingData.model_construct(index=index, embedding=each) for index, each in enumerate(values)]
        return EmbeddingResponse.model_construct(data=data, model=self.model, usage=_usage(self))


def pair_scores(
    outputs: Sequence[RequestOutput], num_pairs: int, pooling: PoolingConfig | None, use_activation: bool | None
) -> list[float]:
    """The scores of pairs by a cross-encoder, or by the vectors of both texts. Equal pairs have equal scores, although
    the last bits of a result may depend on the texts that are computed in the same step."""
    assert pooling is not None, "the model computes vectors or scores"
    rows_of: dict[tuple[int, ...], list[float]] = {}
    rows = [rows_of.setdefault(tuple(output.prompt_token_ids), pooled_values(output)) for output in outputs]
    if pooling.task == "score":
        return [row[0 if use_activation is False else 1] for row in rows]
    firsts, seconds = rows[:-num_pairs], rows[-num_pairs:]
    if len(firsts) == 1:
        firsts *= num_pairs
    pairs = zip(firsts, seconds, strict=True)
    return [similarity(first, second, pooling.similarity) for first, second in pairs]


class ScoreCall(EngineCall[ScoreRequest, RequestPlan]):
    id_prefix = "score-"

    def response(self, outputs: list[RequestOutput]) -> ScoreResponse:
        pooling = self.llm.engine.facts.pooling
        scores = pair_scores(outputs, len(as_list(self.body.text_2)), pooling, self.body.use_activation)
        data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreResponse(id=self.id, created=self.created, model=self.model, data=data, usage=_usage(self))


class RerankCall(EngineCall[RerankRequest, RequestPlan]):
    id_prefix = "rerank-"

    def response(self, outputs: list[RequestOutput]) -> RerankResponse:
        texts = self.body.texts()
        scores = pair_scores(outputs, len(texts), self.llm.engine.facts.pooling, self.body.use_activation)
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
    assert engine.facts.pooling is not None, "the task has been checked"
    size = engine.facts.pooling.vector_size
    if body.dimensions is not None and body.dimensions > size:
        raise RequestError(f"dimensions={body.dimensions} exceeds the {size} values of a vector", "dimensions")
    processor, options = engine.input_processor, body.options(add_special_tokens=body.add_special_tokens)
    if (chat := body.chat()) is not None:
        return _plan([processor.encode_pooled_messages(planner.rendered(chat), options)], "messages")
    texts = as_list("" if body.input is None else body.input)
    prompts = (
        processor.encode_pooled(text, None, options, (label,))
        if isinstance(text, str)
        else processor.check_pooled(text, options, label)
        for label, text in labelled_values("input", texts)
    )
    adds_none = body.add_special_tokens is not None and not isinstance(texts[0], str)
    return _plan(prompts, "input", ("add_special_tokens",) if adds_none else ())


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
    if most := body.max_tokens_per_doc:
        assert not isinstance(engine.tokenizer, NoTokenizer), "a model that computes scores has a tokenizer"
        texts = [engine.tokenizer.first_tokens(text, most) for text in texts]
    return _plan_pairs(engine, [body.query], texts, body, ("query", "documents"))
