"""Check of llama-index: completions, chats and streams of its class for servers with OpenAI's API."""

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    """Call the server in each way, and check the answers."""
    llm = OpenAILike(
        model="smollm2-135m-instruct",
        api_base=f"{os.environ['CHAIRLIFT_URL']}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=40,
    )
    question = "What is the capital of France?"
    assert "Paris" in llm.complete(question).text
    messages = [ChatMessage(role="user", content=question)]
    assert "Paris" in llm.chat(messages).message.content
    assert "Paris" in list(llm.stream_chat(messages))[-1].message.content
    print("llama-index: completions, chats and streams")


if __name__ == "__main__":
    main()
