"""The OpenAI API's bodies, as far as they are honoured. An unknown field or value is refused, never ignored.

Field names are OpenAI's; below the line in each request they are vLLM's, for what OpenAI does not have.
"""

from chairlift.server.protocol.base import (
    Body,
    ErrorBody,
    ErrorInfo,
    Health,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    Usage,
)
from chairlift.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Delta,
    TextFormat,
    TextPart,
    TopLogprob,
)
from chairlift.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from chairlift.server.protocol.sampling import (
    SamplingFields,
    StreamOptions,
)

__all__ = [
    "AnswerMessage",
    "Body",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionRequest",
    "ChatLogprob",
    "ChatLogprobs",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "Delta",
    "ErrorBody",
    "ErrorInfo",
    "Health",
    "ModelCard",
    "ModelList",
    "PromptTokensDetails",
    "SamplingFields",
    "StreamOptions",
    "TextFormat",
    "TextPart",
    "TopLogprob",
    "Usage",
]
