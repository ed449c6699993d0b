"""Answer a list of prompts, as a script for vLLM does: only the import differs.

python examples/from_vllm/basic.py MODEL
"""

import sys

from chairlift import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The opposite of hot is", "One, two, three,"]


def main() -> None:
    """Print the tokens and the text of each answer."""
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12)):
        print(output.prompt, output.outputs[0].token_ids, repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
