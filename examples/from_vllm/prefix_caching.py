"""Share a long prefix between prompts, as a script for vLLM does: only the import differs.

python examples/from_vllm/prefix_caching.py MODEL
"""

import sys

from chairlift import LLM, SamplingParams

PREFIX = (
    "You are the librarian of a small town. " + "You know every book, and you answer with one short sentence. " * 12
)
QUESTIONS = ["Question: where are the maps? Answer:", "Question: when do you close? Answer:"]


def main() -> None:
    """Print the answers without and with cached blocks, and after the cache was reset."""
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024, enable_prefix_caching=True)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [PREFIX + question for question in QUESTIONS]
    cold = [llm.generate(prompt, params)[0] for prompt in prompts]
    warm = llm.generate(prompts, params)
    reset = llm.reset_prefix_cache()
    again = llm.generate(prompts[:1], params)[0]
    for output in [*cold, *warm, again]:
        print(output.outputs[0].token_ids, "cached" if output.num_cached_tokens else "computed")
    print(reset)


if __name__ == "__main__":
    main()
