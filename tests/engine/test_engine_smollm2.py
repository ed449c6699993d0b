"""The default model in its GGUF file generates the tokens of transformers, which loads the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from native import needs_native

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Wasser ist",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,",
]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    """An LLM with float32 weights and without quantized activations, as in transformers."""
    return LLM(str(smollm2_gguf), kernels="torch", num_kv_blocks=100, num_threads=1, max_num_seqs=16)


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    llm: LLM, smollm2_oracle: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    greedy = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    monkeypatch.setattr(smollm2_oracle, "generation_config", greedy)
    for output in llm.generate(PROMPTS, params):
        answer = output.outputs[0]
        tokens = smollm2_oracle.generate(torch.tensor([output.prompt_token_ids]))[0]
        assert answer.token_ids == tokens[len(output.prompt_token_ids) :].tolist()
        with torch.inference_mode():
            logits = smollm2_oracle(tokens[None]).logits[0, len(output.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, tokens[len(output.prompt_token_ids) :, None])[:, 0]
        assert answer.logprobs is not None
        ours = torch.tensor([entry.token.logprob for entry in answer.logprobs])
        torch.testing.assert_close(ours, expected, atol=2e-3, rtol=0)


@needs_native
def test_native_kernels_compute_with_the_quantized_file(
    smollm2_gguf: Path, smollm2_oracle: transformers.PreTrainedModel
) -> None:
    """Activations are quantized to 8 bits, so logprobs differ slightly but are not biased."""
    native = LLM(str(smollm2_gguf), kernels="native", num_kv_blocks=100, num_threads=1, max_num_seqs=16)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ours, expected = [], []
    for output in native.generate([PROMPTS[3], PROMPTS[4]], params, use_tqdm=False):
        tokens = torch.tensor(output.prompt_token_ids)
        with torch.inference_mode():
            logprobs = smollm2_oracle(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected.append(logprobs.gather(-1, tokens[1:, None])[:, 0])
        entries = output.prompt_logprobs or []
        ours.append(torch.tensor([entry.token.logprob for entry in entries if entry is not None]))
    difference = torch.cat(ours) - torch.cat(expected)
    assert difference.abs().mean() < 0.1
    assert difference.mean().abs() < 0.03
