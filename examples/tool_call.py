"""Let the model call a tool, run it, and return its result to the model.

chairlift serve
python examples/tool_call.py            # CHAIRLIFT_URL selects another server
"""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str) -> str:
    """Return the weather that a service would return."""
    return f"It is sunny in {city}."


def main() -> None:
    """Print the call of the tool, and the answer of the model to its result."""
    url = os.environ.get("CHAIRLIFT_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"{call.function.name}({arguments}) -> {result}")

    messages.append(
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
            ],
        }
    )
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    final = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=32
    )
    print(final.choices[0].message.content)


if __name__ == "__main__":
    main()
