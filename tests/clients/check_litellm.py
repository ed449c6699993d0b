"""Check of litellm: whole answers, streams, tools and text completions through its generic provider."""

from __future__ import annotations

import os

import litellm

MODEL = "openai/smollm2-135m-instruct"
OPTIONS = {"api_base": f"{os.environ['CHAIRLIFT_URL']}/v1", "api_key": "none", "temperature": 0, "max_tokens": 40}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def main() -> None:
    """Call the server with every feature, and check the answers."""
    answer = litellm.completion(model=MODEL, messages=MESSAGES, **OPTIONS)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    stream = litellm.completion(model=MODEL, messages=MESSAGES, stream=True, **OPTIONS)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    choice = {"type": "function", "function": {"name": "weather"}}
    called = litellm.completion(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, **OPTIONS)
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    text = litellm.text_completion(
        model="text-completion-openai/smollm2-135m-instruct", prompt="The capital of France is", **OPTIONS
    )
    assert "Paris" in text.choices[0].text
    print("litellm: whole answers, streams, tools and text completions")


if __name__ == "__main__":
    main()
