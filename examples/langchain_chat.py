"""Use LangChain's OpenAI classes with a server: a chat, and an answer that follows a schema.

pip install langchain-openai
chairlift serve
python examples/langchain_chat.py       # CHAIRLIFT_URL selects another server
"""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    is_sunny: bool


def main() -> None:
    """Print a streamed answer and a structured one."""
    url = os.environ.get("CHAIRLIFT_URL", "http://127.0.0.1:8000")
    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="smollm2-135m-instruct", temperature=0, max_completion_tokens=60
    )
    for chunk in chat.stream("What is the capital of France?"):
        print(chunk.text, end="", flush=True)
    print()
    print(chat.with_structured_output(Weather).invoke("The weather in Paris, as JSON."))


if __name__ == "__main__":
    main()
