"""Check of haystack: its chat generator with and without a stream."""

from __future__ import annotations

import os

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret


def main() -> None:
    """Run the generator in both ways, and check the answers."""
    question = [ChatMessage.from_user("What is the capital of France?")]
    chunks: list[str] = []
    for callback in (None, lambda chunk: chunks.append(chunk.content or "")):
        generator = OpenAIChatGenerator(
            model="smollm2-135m-instruct",
            api_base_url=f"{os.environ['CHAIRLIFT_URL']}/v1",
            api_key=Secret.from_token("none"),
            generation_kwargs={"temperature": 0, "max_tokens": 40},
            streaming_callback=callback,
        )
        (reply,) = generator.run(question)["replies"]
        assert "Paris" in reply.text
    assert "Paris" in "".join(chunks)
    print("haystack: whole answers and streams")


if __name__ == "__main__":
    main()
