"""Check of pydantic-ai with chat completions and with responses: answers, streams and structured output."""

from __future__ import annotations

import asyncio
import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "smollm2-135m-instruct"
SETTINGS = {"temperature": 0, "max_tokens": 60}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


async def main() -> None:
    """Run agents on both APIs."""
    provider = OpenAIProvider(base_url=f"{os.environ['CHAIRLIFT_URL']}/v1", api_key="none")
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        agent = Agent(model, model_settings=SETTINGS)
        answer = await agent.run("What is the capital of France?")
        assert "Paris" in answer.output
        async with agent.run_stream("What is the capital of France?") as stream:
            assert "Paris" in await stream.get_output()
        structured = await Agent(model, output_type=City, model_settings=SETTINGS).run("Paris")
        assert isinstance(structured.output, City)
    print("pydantic-ai: answers, streams and structured output with chat completions and responses")


if __name__ == "__main__":
    asyncio.run(main())
