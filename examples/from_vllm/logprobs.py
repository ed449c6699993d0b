"""Several answers to a prompt, and the logprobs of answers and prompts, as a script for vLLM does: only the import
differs.

python examples/from_vllm/logprobs.py MODEL
"""

import sys

from chairlift import LLM, SamplingParams

PROMPT = "Once upon a time"


def main() -> None:
    """Print the number of answers, and each token with its logprob, its rank and its text."""
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    sampled = greedy.clone()
    sampled.n, sampled.temperature, sampled.prompt_logprobs = 3, 0.9, None  # type: ignore[misc]
    (output, several) = llm.generate([PROMPT, PROMPT], [greedy, sampled])
    answer = output.outputs[0]
    for token_id, position in zip(answer.token_ids, answer.logprobs or [], strict=True):
        print(
            token_id,
            f"{position[token_id].logprob:.1f}",
            position[token_id].rank,
            repr(position[token_id].decoded_token),
        )
        print("  ", {other: repr(entry.decoded_token) for other, entry in position.items()})
    for token_id, found in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
        print(token_id, None if found is None else [(other, entry.rank) for other, entry in found.items()])
    print(len(several.outputs), [len(each.logprobs or []) == len(each.token_ids) for each in several.outputs])


if __name__ == "__main__":
    main()
