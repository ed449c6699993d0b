"""Find the best sequences of prompts, as a script for vLLM does: only the imports differ.

python examples/from_vllm/beam_search.py MODEL
"""

import sys

from chairlift import LLM
from chairlift.sampling_params import BeamSearchParams

PROMPTS = ["The capital of France is", "One, two, three,"]


def main() -> None:
    """Print each sequence with the sum of its logprobs."""
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    for output in llm.beam_search([{"prompt": prompt} for prompt in PROMPTS], params):
        for sequence in output.sequences:
            print(sequence.tokens, f"{sequence.cum_logprob:.1f}", len(sequence.logprobs), repr(sequence.text))


if __name__ == "__main__":
    main()
