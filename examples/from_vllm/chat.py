"""Answer a batch of conversations, as a script for vLLM does: only the import differs.

python examples/from_vllm/chat.py MODEL
"""

import sys

from chairlift import LLM

QUESTIONS = ["What is the capital of France?", "Name a colour of the sky."]


def main() -> None:
    """Print the tokens and the text of each answer, which have the model's sampling parameters, but for two."""
    llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024)
    params = llm.get_default_sampling_params()
    params.temperature = 0.0  # type: ignore[misc]
    params.max_tokens = 16  # type: ignore[misc]
    conversations = [
        [{"role": "system", "content": "You are brief."}, {"role": "user", "content": question}]
        for question in QUESTIONS
    ]
    for output in llm.chat(conversations, params, use_tqdm=False):
        print(len(output.prompt_token_ids or []), output.outputs[0].token_ids, repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
