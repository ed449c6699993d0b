"""Check of LangChain's unmodified OpenAI classes: completions, chats, tools, structured output and responses."""

from __future__ import annotations

import os

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

COMMON = {
    "base_url": f"{os.environ['CHAIRLIFT_URL']}/v1",
    "api_key": "none",
    "model": "smollm2-135m-instruct",
    "temperature": 0,
    "max_tokens": 60,
}
QUESTION = "What is the capital of France?"


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    is_sunny: bool


def check_completions() -> None:
    """Check completions without and with streaming, and several choices."""
    completions = OpenAI(**{**COMMON, "max_tokens": 8})
    whole = completions.invoke("The capital of France is")
    assert whole.startswith(" Paris"), whole
    assert "".join(completions.stream("The capital of France is")) == whole
    several = OpenAI(**{**COMMON, "max_tokens": 8, "temperature": 1, "n": 2})
    assert [len(choices) for choices in several.generate(["One,", "Two,"]).generations] == [2, 2]


def check_tools(chat: ChatOpenAI) -> None:
    """Check a tool call, the same call with streaming, and an answer after its result."""
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("How is the weather in Paris?")
    (call,) = answer.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    chunks = list(bound.stream("How is the weather in Paris?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.tool_calls[0]["args"] == call["args"]
    messages = [HumanMessage("How is the weather in Paris?"), answer, ToolMessage("Sunny.", tool_call_id=call["id"])]
    assert isinstance(chat.bind_tools([Weather]).invoke(messages), AIMessage)


def main() -> None:
    """Call the server with every class and option, and check the answers."""
    check_completions()
    chat = ChatOpenAI(**COMMON)
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text, whole
    assert whole.usage_metadata is not None
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole.text
    for method in ("json_schema", "function_calling"):
        structured = chat.with_structured_output(Weather, method=method).invoke("The weather in Paris, as JSON.")
        assert isinstance(structured, Weather), structured
    check_tools(chat)
    responses = ChatOpenAI(**COMMON, use_responses_api=True)
    assert responses.invoke(QUESTION).text == whole.text
    assert "".join(chunk.text for chunk in responses.stream(QUESTION)) == whole.text
    print("langchain-openai: completions, chats, streams, structured output, tools, responses")


if __name__ == "__main__":
    main()
