"""The default model in its GGUF file has the weights, and generates the tokens, of transformers with the same file.

These tests are in one module because transformers takes many seconds to read the file.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.loading.model_source import GGUFSource
from chairlift.models.declaration.attention_spec import RopeConfig
from support.gguf_files import files_read_once
from support.native import needs_native
from support.position_logprobs import first_logprobs

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Wasser ist",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,",
]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    """An LLM with float32 weights and without quantized activations, as in transformers."""
    return LLM(str(smollm2_gguf), kernels="torch", num_kv_blocks=100, num_threads=1, max_num_seqs=16)


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> transformers.PreTrainedModel:
    """The default model as transformers itself reads the file, in float32."""
    with files_read_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
        )
    return model.eval()


def test_weights_equal_those_of_transformers(smollm2_gguf: Path, oracle: transformers.PreTrainedModel) -> None:
    files = GGUFSource(smollm2_gguf, "test")
    config = files.config()
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    assert {layer.attention.rope for layer in config.layers} == {RopeConfig(theta=100000.0)}
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings
    with pytest.raises(ModelLoadError, match=r"tensor output\.weight is missing"):
        weights.tensor("lm_head.weight", (49152, 576))
    for name, parameter in oracle.named_parameters():
        ours = weights.tensor(name, tuple(parameter.shape))
        assert torch.equal(ours, parameter.detach()), name
    assert weights.unused() == []


def test_greedy_tokens_and_logprobs_are_those_of_transformers(llm: LLM, oracle: transformers.PreTrainedModel) -> None:
    """The answer is greedy if each of its tokens has the largest logit after those before it."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    for output in llm.generate(PROMPTS, params):
        answer = output.outputs[0]
        tokens = torch.tensor([*output.prompt_token_ids, *answer.token_ids])
        with torch.inference_mode():
            logits = oracle(tokens[None]).logits[0, len(output.prompt_token_ids) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        assert len(answer.token_ids) == NEW_TOKENS
        expected = logits.log_softmax(-1).gather(-1, tokens[len(output.prompt_token_ids) :, None])[:, 0]
        assert answer.logprobs is not None
        ours = torch.tensor(first_logprobs(answer.logprobs))
        torch.testing.assert_close(ours, expected, atol=2e-3, rtol=0)


@needs_native
def test_native_kernels_compute_with_the_quantized_file(
    smollm2_gguf: Path, oracle: transformers.PreTrainedModel
) -> None:
    """Activations are quantized to 8 bits, so logprobs differ slightly but are not biased."""
    native = LLM(str(smollm2_gguf), kernels="native", num_kv_blocks=100, num_threads=1, max_num_seqs=16)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    ours, expected = [], []
    for output in native.generate([PROMPTS[3], PROMPTS[4]], params, use_tqdm=False):
        tokens = torch.tensor(output.prompt_token_ids)
        with torch.inference_mode():
            logprobs = oracle(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected.append(logprobs.gather(-1, tokens[1:, None])[:, 0])
        ours.append(torch.tensor(first_logprobs(output.prompt_logprobs or [])))
    difference = torch.cat(ours) - torch.cat(expected)
    assert difference.abs().mean() < 0.1
    assert difference.mean().abs() < 0.03
