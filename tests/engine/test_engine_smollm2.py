"""The real model through the real GGUF: transformers' own loading of the same file gives the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Wasser ist",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,",
]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return model.eval()


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    llm: LLM, reference: transformers.PreTrainedModel
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    for output in llm.generate(PROMPTS, params):
        answer = output.outputs[0]
        tokens = reference.generate(torch.tensor([output.prompt_token_ids]))[0]
        assert answer.token_ids == tokens[len(output.prompt_token_ids) :].tolist()
        with torch.inference_mode():
            logits = reference(tokens[None]).logits[0, len(output.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, tokens[len(output.prompt_token_ids) :, None])[:, 0]
        assert answer.logprobs is not None
        ours = torch.tensor([entry.token.logprob for entry in answer.logprobs])
        torch.testing.assert_close(ours, expected, atol=2e-3, rtol=0)
