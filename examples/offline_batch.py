"""Answer a list of prompts in one process: continuous batching runs them together.

python examples/offline_batch.py
"""

from chairlift import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Two plus two is", "The opposite of hot is"]


def main() -> None:
    """Print each prompt with its continuation and the reason why it ended."""
    llm = LLM(num_kv_blocks=400)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
