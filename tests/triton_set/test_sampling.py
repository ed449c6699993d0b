from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.kernels.sampling import SamplingKernels, SamplingParameters
from chairlift.kernels.triton import sampling
from chairlift.kernels.triton.sampling import TILE, TritonSampling
from chairlift.worker.random_stream import stream_key, uniform
from chairlift.worker.torch_sampling import TorchSampling
from support.case_loop import loop_over

SEVERAL_TILES = 2 * TILE + 100


def parameters(num_rows: int, **values: Any) -> SamplingParameters:
    """Sampling parameters; each argument is one value for all rows, or one value per row."""
    neutral = SamplingParameters(
        is_random=np.ones(num_rows, np.uint8),
        temperature=np.ones(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int64),
        top_p=np.ones(num_rows),
        min_p=np.zeros(num_rows, np.float32),
        keys=np.array([stream_key(seed) for seed in range(num_rows)], np.uint64),
        positions=np.arange(num_rows) * 3 + (1 << 33),
    )
    for name, value in values.items():
        getattr(neutral, name)[:] = value
    return neutral


def sample(kernels: SamplingKernels, logits: torch.Tensor, given: SamplingParameters, *rows: int) -> list[int]:
    index = np.array(rows or range(len(logits)))
    tokens: list[int] = kernels.make_sampler(given)(logits[index].clone(), index).tolist()
    return tokens


def normal(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 1e-20},
    {"temperature": 100.0, "min_p": 0.97},
    {"min_p": 1.0},
    {"top_k": 4, "temperature": 1.7},
    {"top_k": 3, "temperature": 1e-6},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"top_p": 0.999, "temperature": 0.4},
    {"top_k": 4, "top_p": 0.6, "min_p": 0.01},
]


@loop_over("values", FILTERS)
@pytest.mark.parametrize("decimals", [0, 5])
def test_draws_are_those_of_torch(decimals: int, values: dict[str, float]) -> None:
    """Without decimals many tokens have the same weight."""
    given, logits = parameters(3, **values), normal(3, 150).round(decimals=decimals)
    assert sample(TritonSampling(), logits, given) == sample(TorchSampling(), logits, given)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling, "TILE", 256)
    sampling.sampling_launches.cache_clear()
    yield
    sampling.sampling_launches.cache_clear()


@pytest.mark.usefixtures("small_tiles")
@loop_over("values", [{"min_p": 0.001}, {"top_k": 90}, {"top_p": 0.75}])
def test_draws_from_small_tiles_are_those_of_torch(values: dict[str, float]) -> None:
    """In all rows but the first there are only two logits, so that top_p keeps some of the tokens of each tile."""
    given, logits = parameters(4, **values), normal(4, 1000)
    logits[1:] = (logits[1:] > 1).float()
    assert sample(TritonSampling(), logits, given) == sample(TorchSampling(), logits, given)


@loop_over("values", [{}, {"top_k": 900, "top_p": 0.9}])
def test_draws_from_large_tiles_are_those_of_torch(values: dict[str, float]) -> None:
    given, logits = parameters(2, **values), normal(2, SEVERAL_TILES)
    assert sample(TritonSampling(), logits, given) == sample(TorchSampling(), logits, given)


def test_many_draws_of_one_row_are_those_of_torch() -> None:
    given, logits = parameters(100, keys=stream_key(7)), normal(1, 40).expand(100, 40)
    tokens = sample(TritonSampling(), logits, given)
    assert tokens == sample(TorchSampling(), logits, given)
    assert len(set(tokens)) > 10


@loop_over("values", [{}, {"top_k": 250}, {"top_p": 0.999999}])
def test_the_first_and_the_last_token_of_a_distribution_are_drawn(values: dict[str, float]) -> None:
    logits = torch.full((2, 300), -torch.inf)
    logits[:, 40:260] = torch.linspace(-3.0, 3.0, 220)
    numbers = uniform(np.full(50_000, stream_key(1), np.uint64), np.arange(50_000))
    zero = np.uint64(-0x9E3779B97F4A7C15 % (1 << 64))
    assert uniform(np.array([zero]), np.array([0])) == 0
    keys, positions = np.array([zero, stream_key(1)]), np.array([0, numbers.argmax()])
    assert sample(TritonSampling(), logits, parameters(2, keys=keys, positions=positions, **values)) == [40, 259]


@loop_over("vocab_size", [1, 5, 33, SEVERAL_TILES])
def test_greedy_rows_get_the_first_likeliest_token(vocab_size: int) -> None:
    greedy = parameters(6, is_random=0)
    for seed, specials in enumerate(([], [torch.nan], [torch.inf, torch.nan], [torch.inf], [-torch.inf])):
        logits = normal(6, vocab_size, seed).round()
        for value in specials:
            logits[:, vocab_size // 2] = value
        logits[3] = -torch.inf
        logits[4] = torch.tensor([-0.0, 0.0]).repeat(vocab_size)[:vocab_size]
        assert sample(TritonSampling(), logits, greedy) == logits.argmax(dim=1).tolist()


@loop_over("special", [torch.nan, torch.inf, None])
def test_rows_without_a_distribution_end_as_in_torch(special: float | None) -> None:
    logits = normal(1, 9)
    logits[0, 3 if special is not None else slice(None)] = -torch.inf if special is None else special
    for values in ({}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3}):
        given = parameters(1, **values)
        assert sample(TritonSampling(), logits, given) == sample(TorchSampling(), logits, given)


def test_a_token_does_not_depend_on_its_batch() -> None:
    row, logits = np.arange(16), normal(16, 500)
    filters = {"top_k": np.array([0, 50])[row % 2], "top_p": np.array([1.0, 0.9])[row // 2 % 2]}
    given = parameters(16, is_random=row % 5 != 0, temperature=np.array([0.5, 2.0])[row // 4 % 2], **filters)
    alone = [sample(TritonSampling(), logits, given, i)[0] for i in range(16)]
    assert alone == sample(TorchSampling(), logits, given)
    random = np.random.default_rng(0)
    for size in (2, 5, 16):
        order = random.permutation(16)[:size].tolist()
        assert sample(TritonSampling(), logits, given, *order) == [alone[i] for i in order]


def test_parameters_are_read_at_each_call() -> None:
    given, logits = parameters(1, temperature=3.0), normal(1, 100)
    sampler, tokens = TritonSampling().make_sampler(given), set()
    for position in range(20):
        given.positions[0] = position
        tokens.add(int(sampler(logits.clone(), np.array([0]))))
    assert len(tokens) > 5


@loop_over("vocab_size", [1, 31, 32, 200, SEVERAL_TILES])
def test_masks_equal_torch(vocab_size: int) -> None:
    masks = np.random.default_rng(1).integers(0, 1 << 32, (3, -(-vocab_size // 32)), dtype=np.uint32)
    found, expected = normal(5, vocab_size), normal(5, vocab_size)
    for logits, kernels in ((found[1:], TritonSampling()), (expected[1:], TorchSampling())):
        kernels.mask(logits, np.array([3, 0, 2]), masks)
    assert torch.equal(found, expected)


@loop_over("vocab_size", [1, 60, SEVERAL_TILES])
def test_logprobs_equal_torch(vocab_size: int) -> None:
    logits, given = normal(5, vocab_size), torch.tensor([0, vocab_size - 1, 0, 0, 0])
    logits[2, 0] = -torch.inf
    logits[3, 0] = torch.nan
    logits[4, 0] = 1e30
    ids, logprobs, ranks = TritonSampling().logprobs(logits, given, 5)
    torch_ids, torch_logprobs, torch_ranks = TorchSampling().logprobs(logits, given, 5)
    torch.testing.assert_close(logprobs, torch_logprobs, rtol=1e-6, atol=2e-6, equal_nan=True)
    assert ids.equal(torch_ids)
    assert ranks.equal(torch_ranks)
    alone = [TritonSampling().logprobs(logits[i : i + 1], given[i : i + 1], 5)[1] for i in range(5)]
    assert torch.equal(torch.cat(alone).nan_to_num(), logprobs.nan_to_num())
