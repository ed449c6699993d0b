"""Check of instructor: structured output by tools and by JSON schema."""

from __future__ import annotations

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def main() -> None:
    """Extract a person in each mode."""
    openai = OpenAI(base_url=f"{os.environ['CHAIRLIFT_URL']}/v1", api_key="none")
    model = openai.models.list().data[0].id
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai, mode=mode)
        person = client.chat.completions.create(
            model=model,
            response_model=Person,
            messages=[{"role": "user", "content": "Jason is 25 years old."}],
            max_tokens=60,
            temperature=0,
            max_retries=0,
        )
        assert isinstance(person, Person), person
    print("instructor: structured output with tools and with a JSON schema")


if __name__ == "__main__":
    main()
