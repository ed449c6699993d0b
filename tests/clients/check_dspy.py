"""Check of dspy: a prediction with the default adapter."""

from __future__ import annotations

import os

import dspy


def main() -> None:
    """Ask the model directly, and through a signature."""
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
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    prediction = dspy.Predict("question -> answer")(question="What is the capital of France?")
    assert isinstance(prediction.answer, str)
    print("dspy: an answer, and a prediction with a JSON schema")


if __name__ == "__main__":
    main()
