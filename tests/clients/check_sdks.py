"""Check of the official packages `openai` and `anthropic`: whole answers, streams, tools and structured output."""

from __future__ import annotations

import os

from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

URL = os.environ["CHAIRLIFT_URL"]
QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: str
    inhabitants: int


def main() -> None:
    """Call every API with the defaults of the packages."""
    openai = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = openai.models.list().data[0].id
    messages = [{"role": "user", "content": QUESTION}]
    chat = openai.chat.completions.create(model=model, messages=messages, temperature=0, store=True)
    assert "Paris" in chat.choices[0].message.content
    stream = openai.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    response = openai.responses.create(model=model, input=QUESTION, temperature=0, store=True)
    assert "Paris" in response.output_text
    parsed = openai.chat.completions.parse(model=model, messages=messages, response_format=City, max_tokens=80)
    assert isinstance(parsed.choices[0].message.parsed, City)
    anthropic = Anthropic(base_url=URL, api_key="none")
    call = {"model": model, "max_tokens": 20, "messages": messages, "extra_body": {"temperature": 0}}
    message = anthropic.messages.create(**call)
    assert "Paris" in message.content[0].text
    assert (chat._request_id, message._request_id) == (chat.id, message.id)
    with anthropic.messages.stream(**call) as events:
        assert "Paris" in "".join(events.text_stream)
    print("openai and anthropic: whole answers, streams, responses and structured output")


if __name__ == "__main__":
    main()
