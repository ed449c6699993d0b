"""The OpenAI API's bodies, as far as they are honoured. An unknown field or value is refused, never ignored.

Field names are OpenAI's; below the line in each request they are vLLM's, for what OpenAI does not have.
"""

from chairlift.server.protocol.base import (
    Body,
    CompletionTokensDetails,
    ErrorBody,
    ErrorInfo,
    Health,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    Usage,
)
from chairlift.server.protocol.chat import (
    AssistantMessage,
    ChatCompletionRequest,
    RefusalPart,
    SpokenMessage,
    TextPart,
    ToolMessage,
)
from chairlift.server.protocol.chat_answers import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
)
from chairlift.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from chairlift.server.protocol.sampling import (
    PASSED_ON,
    EngineFields,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    SamplingFields,
    StreamOptions,
    StructuredOutputsField,
    TextFormat,
)
from chairlift.server.protocol.timings import (
    Timings,
)
from chairlift.server.protocol.tools import (
    AllowedTools,
    AllowedToolsChoice,
    AnsweredFunction,
    AnsweredToolCall,
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    FunctionTool,
    NamedTool,
    ToolCallParam,
    chosen_tools,
)

__all__ = [
    "PASSED_ON",
    "AllowedTools",
    "AllowedToolsChoice",
    "AnswerMessage",
    "AnsweredFunction",
    "AnsweredToolCall",
    "AssistantMessage",
    "Body",
    "CalledFunction",
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionRequest",
    "ChatLogprob",
    "ChatLogprobs",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "CompletionTokensDetails",
    "EngineFields",
    "ErrorBody",
    "ErrorInfo",
    "FunctionDefinition",
    "FunctionName",
    "FunctionTool",
    "Health",
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "ModelCard",
    "ModelList",
    "NamedTool",
    "PromptTokensDetails",
    "RefusalPart",
    "SamplingFields",
    "SpokenMessage",
    "StreamOptions",
    "StructuredOutputsField",
    "TextFormat",
    "TextPart",
    "Timings",
    "ToolCallParam",
    "ToolMessage",
    "TopLogprob",
    "Usage",
    "chosen_tools",
]
