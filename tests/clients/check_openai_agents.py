"""Check of openai-agents: tools and streams with chat completions and with responses."""

from __future__ import annotations

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODEL = "smollm2-135m-instruct"
calls: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    calls.append(city)
    return f"The weather in {city} is sunny."


async def main() -> None:
    """Run agents with a forced tool and with streams."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{os.environ['CHAIRLIFT_URL']}/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        plain = Agent(name="plain", model=model, model_settings=ModelSettings(temperature=0, max_tokens=40))
        result = await Runner.run(plain, "What is the capital of France?")
        assert "Paris" in result.final_output
        streamed = Runner.run_streamed(plain, "What is the capital of France?")
        events = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in events
        assert "Paris" in streamed.final_output
        settings = ModelSettings(temperature=0, max_tokens=60, tool_choice="weather")
        agent = Agent(name="tools", model=model, model_settings=settings, tools=[weather])
        calls.clear()
        answer = await Runner.run(agent, "How is the weather in Paris?")
        assert calls
        assert answer.final_output
    print("openai-agents: answers, streams and tools with chat completions and responses")


if __name__ == "__main__":
    asyncio.run(main())
