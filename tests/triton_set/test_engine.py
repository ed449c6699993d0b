"""The engine with interpreted Triton kernels generates the greedy tokens of transformers.

The prompts are computed in chunks, some of them begin with cached blocks, requests are preempted, draft tokens are
verified, and decode steps are replayed. On the CPU a capture records operations and launches with their numbers, and a
replay repeats them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_decoder
from chairlift.events import EventList, RequestFinished, Step
from chairlift.kernels.graph_sizes import graph_sizes
from chairlift.worker.decode_graphs import CapturedStep, StepCapture, with_decode_graphs
from chairlift.worker.request_rows import RequestRows
from support.recorded_capture import RecordedCapture
from support.tiny_models import load_reference

NEW_TOKENS = 8
SQUEEZED: dict[str, Any] = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
}
NUM_BLOCKS = {"llama": 14, "mixtral": 14, "gpt_oss": 24, "granite4_h": 14}
"""The blocks of each architecture, which are too few for four requests."""


def make_prompts() -> list[list[int]]:
    """Prompts that repeat themselves, with a common beginning or none, and the first of them again."""
    rng = random.Random(7)
    common = [rng.randrange(3, 256) for _ in range(9)] * 2
    return [[*common, 9], [rng.randrange(3, 256)] * 13, [5, 6, 7, 5, 6], [*common, 10, 11], [*common, 9]]


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    fixed: dict[str, Any] = {"kernels": "triton", "dtype": "float32", "num_threads": 1}
    return EngineConfig(model=str(folder), skip_tokenizer_init=True, **fixed, **options)


def generate(
    folder: Path, capture: StepCapture, prompts: list[list[int]], num_kv_blocks: int, **options: Any
) -> tuple[list[list[int]], EventList]:
    sizes = {"block_size": 4, "max_model_len": 40, "num_kv_blocks": num_kv_blocks, **SQUEEZED}
    config = engine_config(folder, **sizes, **options)
    events = EventList()
    with (
        patch.object(decoder_engine, "measured_row_time", lambda *_: None),
        patch.object(decoder_engine, "PROBES", (2, 5)),
        patch.object(decoder_engine, "find_capture", lambda *_: capture),
    ):
        llm = LLM(engine=build_engine(config, events=events))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return [output.outputs[0].token_ids for output in outputs], events


@torch.inference_mode()
def likeliest(reference: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of an answer, given those before it."""
    found: list[int] = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(dim=1).tolist()
    return found


def check_tokens(folder: Path, tokens: list[list[int]]) -> None:
    reference = load_reference(folder)
    for prompt, answer in zip(make_prompts(), tokens, strict=True):
        assert len(answer) == NEW_TOKENS
        assert answer == likeliest(reference, prompt, answer)


@pytest.mark.parametrize("arch", NUM_BLOCKS)
def test_greedy_tokens_are_those_of_transformers(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder, capture = tiny_model_dir(arch), RecordedCapture()
    tokens, events = generate(folder, capture, make_prompts(), NUM_BLOCKS[arch])
    check_tokens(folder, tokens)
    assert capture.num_replays > len(graph_sizes(4)), "more than those whose bits are compared at the start"
    steps = [event for event in events.events if isinstance(event, Step)]
    spans = [span for step in steps for span in zip(step.num_scheduled, step.num_computed, strict=True)]
    assert any(count > 1 and computed > 0 for count, computed in spans), "a chunk"
    assert any(event.num_cached_tokens for event in events.events if isinstance(event, RequestFinished))
    assert sum(len(step.preempted) for step in steps) > 0
    assert sum(sum(step.num_draft) for step in steps) > 0


def stale_capture(compute: Callable[[], torch.Tensor]) -> CapturedStep:
    return CapturedStep(lambda: None, compute())


def waiting_capture(compute: Callable[[], torch.Tensor]) -> CapturedStep:
    return RecordedCapture()(lambda: compute() + compute().sum().item())


@pytest.mark.parametrize(
    ("capture", "problem"),
    [
        (stale_capture, "the replay of 1 rows differs from the step itself"),
        (waiting_capture, "RuntimeError: item waits for the device"),
    ],
)
def test_a_model_that_cannot_be_captured_runs_as_it_is(
    capture: StepCapture, problem: str, tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_decoder(engine_config(tiny_model_dir("llama"))).model
    model.allocate_kv_cache(num_blocks=2, block_size=4)
    rows = RequestRows(max_num_seqs=2, max_model_len=8, block_size=4, device=torch.device("cpu"))
    assert with_decode_graphs(model, rows, False, capture) is model
    assert problem in caplog.text


def test_eager_steps_are_not_captured(tiny_model_dir: Callable[..., Path]) -> None:
    def fail(compute: Callable[[], torch.Tensor]) -> CapturedStep:
        raise AssertionError("captured")

    generate(tiny_model_dir("llama"), fail, make_prompts()[1:2], NUM_BLOCKS["llama"], enforce_eager=True)
