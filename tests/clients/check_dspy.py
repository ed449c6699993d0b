"""Check of dspy: an answer, and one that follows a JSON schema."""

from __future__ import annotations

import json
import os

import dspy
from pydantic import BaseModel, Field


class Answer(BaseModel):
    answer: str = Field(max_length=20)


def main() -> None:
    """Call the model as dspy's modules do."""
    lm = dspy.LM(
        "openai/smollm2-135m-instruct",
        api_base=f"{os.environ['CHAIRLIFT_URL']}/v1",
        api_key="none",
        temperature=0,
        max_tokens=200,
        cache=False,
    )
    (answer,) = lm("What is the capital of France?")
    assert "Paris" in (answer if isinstance(answer, str) else answer["text"])
    (structured,) = lm("What is the capital of France?", response_format=Answer)
    assert json.loads(structured if isinstance(structured, str) else structured["text"]).keys() == {"answer"}
    print("dspy: an answer, and one that follows a JSON schema")


if __name__ == "__main__":
    main()
