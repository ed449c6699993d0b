"""Constrain answers to a choice, a regular expression and a JSON schema, as a script for vLLM does: only the imports
differ.

python examples/from_vllm/structured_outputs.py MODEL
"""

import json
import sys

from chairlift import LLM, SamplingParams
from chairlift.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 1, "maxItems": 3}


def main() -> None:
    """Print the text and the tokens of each answer."""
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024)
    constraints = {
        "Is this review good or bad? I like it. Answer: ": StructuredOutputsParams(choice=["good", "bad"]),
        "The year of the moon landing: ": StructuredOutputsParams(regex=r"(19|20)\d\d"),
        "Two numbers above ten as JSON: ": StructuredOutputsParams(json=SCHEMA),
    }
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=constraint)
        for constraint in constraints.values()
    ]
    outputs = llm.generate(list(constraints), params)
    for output in outputs:
        print(output.outputs[0].token_ids, repr(output.outputs[0].text), output.outputs[0].finish_reason)
    print(json.loads(outputs[2].outputs[0].text))


if __name__ == "__main__":
    main()
