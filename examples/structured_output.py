"""Constrain an answer to a JSON schema, with the official OpenAI client.

chairlift serve
python examples/structured_output.py    # CHAIRLIFT_URL selects another server
"""

import json
import os

from openai import OpenAI

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    """Print an invented person, parsed from JSON that follows the schema."""
    url = os.environ.get("CHAIRLIFT_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Invent a person, as JSON."}],
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    )
    person = json.loads(answer.choices[0].message.content or "")
    print(f"{person['name']} is {person['age']} years old")


if __name__ == "__main__":
    main()
