"""Stream a chat answer from a server with the official OpenAI client.

chairlift serve
python examples/chat_stream.py          # CHAIRLIFT_URL selects another server
"""

import os

from openai import OpenAI


def main() -> None:
    """Print the answer while it is generated, then the token counts."""
    url = os.environ.get("CHAIRLIFT_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens")


if __name__ == "__main__":
    main()
