from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.kernel_set import KernelsUnavailableError
from chairlift.kernels.sampling import SamplingParameters
from chairlift.worker.random_stream import stream_key, uniform
from chairlift.worker.torch_sampling import TorchSampling, filter_, weights_
from support.case_loop import loop_over
from support.native import LOOP_ISAS

try:
    NATIVE = load()
except KernelsUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.usefixtures("isa", "same_threads"), pytest.mark.parametrize("isa", LOOP_ISAS, indirect=True)]

FloatArray = npt.NDArray[np.float32]
VOCAB_SIZES = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 63, 500, 1023, 1025, 2049, 5003])
TEMPERATURES = st.sampled_from([1e-20, 1e-6, 0.3, 1.0, 1.7, 100.0])
ROUNDING = 1e-5
"""The distance of a uniform number from the boundary between two tokens within which both are correct."""


def parameters(num_rows: int, **values: Any) -> SamplingParameters:
    """Sampling parameters; each argument is one value for all rows, or one value per row."""
    neutral = SamplingParameters(
        is_random=np.ones(num_rows, np.uint8),
        temperature=np.ones(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int64),
        top_p=np.ones(num_rows),
        min_p=np.zeros(num_rows, np.float32),
        keys=np.array([stream_key(seed) for seed in range(num_rows)], np.uint64),
        positions=np.arange(num_rows) * 3,
    )
    for name, value in values.items():
        getattr(neutral, name)[:] = value
    return neutral


def sample(sampling: Any, logits: torch.Tensor, given: SamplingParameters) -> list[int]:
    tokens: list[int] = sampling.make_sampler(given)(logits.clone(), np.arange(len(logits))).tolist()
    return tokens


def kept_weights(logits: torch.Tensor, given: SamplingParameters) -> npt.NDArray[np.float64]:
    """The probabilities from which torch draws."""
    weights = weights_(logits.clone(), torch.from_numpy(given.temperature))
    filter_(
        weights,
        torch.from_numpy(given.top_k),
        torch.from_numpy(given.top_p),
        torch.from_numpy(given.min_p),
        max_top_k=int(given.top_k.max()),
        any_top_p=True,
    )
    return weights.double().numpy()


def assert_drawn_from(weights: npt.NDArray[np.float64], given: SamplingParameters, tokens: list[int]) -> None:
    for row, token in enumerate(tokens):
        u = float(uniform(given.keys[row : row + 1], given.positions[row : row + 1])[0])
        share = weights[row] / weights[row].sum()
        after = float(share[: token + 1].sum())
        assert share[token] > 0, "a token that was filtered out"
        assert after - share[token] - ROUNDING <= u <= after + ROUNDING


@st.composite
def _logits(draw: st.DrawFn, num_rows: int, vocab_size: int, specials: tuple[float, ...] = ()) -> torch.Tensor:
    """Random rows, some with many ties, some with masked tokens or other special values."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    spread = draw(st.sampled_from([0.01, 1.0, 4.0, 30.0]))
    values = (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    decimals = draw(st.sampled_from([0, 1, 3]))
    values = values.round(decimals)
    for row in range(num_rows):
        for value in draw(st.lists(st.sampled_from(specials), max_size=2)) if specials else ():
            values[row, draw(st.integers(0, vocab_size - 1))] = value
    return torch.from_numpy(values)


@settings(max_examples=60, deadline=None)
@given(st.data(), VOCAB_SIZES)
def test_argmax_equals_torch(data: st.DataObject, vocab_size: int) -> None:
    logits = data.draw(_logits(4, vocab_size, (np.nan, np.inf, -np.inf)))
    greedy = parameters(4, is_random=0)
    assert sample(NativeSampling(), logits, greedy) == logits.argmax(dim=1).tolist()


@loop_over("vocab_size", [1, 5, 33, 4099])
def test_argmax_of_a_tie_is_the_first(vocab_size: int) -> None:
    masked = torch.full((1, vocab_size), -torch.inf)
    assert sample(NativeSampling(), masked, parameters(1, is_random=0)) == [0]
    assert sample(NativeSampling(), torch.full((1, vocab_size), 2.5), parameters(1, is_random=0)) == [0]


@settings(max_examples=60, deadline=None)
@given(st.data(), VOCAB_SIZES)
def test_draws_are_from_the_tokens_that_torch_keeps(data: st.DataObject, vocab_size: int) -> None:
    num_rows = data.draw(st.integers(1, 5))
    each = {"min_size": num_rows, "max_size": num_rows}
    top_k = st.sampled_from([0, 0, 1, 2, 5, 40, 700, vocab_size - 1]).map(lambda k: k if k < vocab_size else 0)
    given_here = parameters(
        num_rows,
        temperature=data.draw(st.lists(TEMPERATURES, **each)),
        top_k=data.draw(st.lists(top_k, **each)),
        top_p=data.draw(st.lists(st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999, 1 - 1e-12]), **each)),
        min_p=data.draw(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.03, 0.7, 1.0]), **each)),
        positions=data.draw(st.lists(st.integers(0, 1 << 40), **each)),
    )
    logits = data.draw(_logits(num_rows, vocab_size, (-np.inf, -3e38)))
    logits[:, 0] = torch.where(logits.isneginf().all(dim=1), 0.0, logits[:, 0])
    tokens = sample(NativeSampling(), logits, given_here)
    assert_drawn_from(kept_weights(logits, given_here), given_here, tokens)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 600), st.sampled_from([np.nan, np.inf, None]))
def test_rows_without_a_distribution_end_as_in_torch(
    data: st.DataObject, vocab_size: int, special: float | None
) -> None:
    logits = data.draw(_logits(1, vocab_size))
    if special is None:
        logits[:] = -torch.inf
    else:
        logits[0, data.draw(st.integers(0, vocab_size - 1))] = special
    for values in ({}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": min(3, vocab_size - 1)}):
        expected = sample(TorchSampling(), logits, parameters(1, **values))
        assert sample(NativeSampling(), logits, parameters(1, **values)) == expected


@loop_over("uniform_is", ["lowest", "highest"])
def test_the_first_and_the_last_token_of_a_distribution_are_drawn(uniform_is: str) -> None:
    """The smallest and the largest uniform number of many positions fall on tokens that have weight."""
    vocab_size = 300
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, 40:260] = torch.linspace(-3.0, 3.0, 220)
    keys, positions = np.full(20_000, stream_key(1), np.uint64), np.arange(20_000)
    numbers = uniform(keys, positions)
    position = int(numbers.argmin() if uniform_is == "lowest" else numbers.argmax())
    given_here = parameters(1, keys=stream_key(1), positions=position)
    (token,) = sample(NativeSampling(), logits, given_here)
    assert token == (40 if uniform_is == "lowest" else 259)


def _mixed(num_rows: int) -> SamplingParameters:
    row = np.arange(num_rows)
    return parameters(
        num_rows,
        is_random=row % 5 != 0,
        temperature=np.array([0.5, 1.0, 2.0])[row % 3],
        top_k=np.array([0, 50, 0, 900])[row % 4],
        top_p=np.array([1.0, 0.9])[row // 4 % 2],
        min_p=np.array([0.0, 0.0, 0.02])[row // 8 % 3],
    )


def _row(given: SamplingParameters, row: int) -> SamplingParameters:
    return SamplingParameters(
        *(getattr(given, name)[row : row + 1].copy() for name in SamplingParameters.__dataclass_fields__)
    )


def test_a_token_does_not_depend_on_batch_threads_or_order() -> None:
    num_rows, vocab_size = 48, 4999
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    given_here = _mixed(num_rows)
    alone = [sample(NativeSampling(), logits[i : i + 1], _row(given_here, i))[0] for i in range(num_rows)]
    for num_threads in (1, 2, 3):
        NATIVE.set_num_threads(num_threads)
        for order in (0, 1, 12345):
            NATIVE.set_tile_order(order)
            assert sample(NativeSampling(), logits, given_here) == alone
    shuffled = np.random.default_rng(0).permutation(num_rows)
    tokens = NativeSampling().make_sampler(given_here)(logits[torch.from_numpy(shuffled)], shuffled)
    assert tokens.tolist() == [alone[row] for row in shuffled]


def test_parameters_are_read_at_each_call_and_logits_do_not_change() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    before, given_here = logits.clone(), parameters(1)
    sampler = NativeSampling().make_sampler(given_here)
    tokens = set()
    for position in range(50):
        given_here.positions[0] = position
        tokens.add(int(sampler(logits, np.array([0]))))
    assert len(tokens) > 10
    assert torch.equal(logits, before)


def test_rows_out_of_range_are_rejected() -> None:
    sampler = NativeSampling().make_sampler(parameters(2))
    for row in (-1, 2):
        with pytest.raises(IndexError, match="row"):
            sampler(torch.zeros(1, 4), np.array([row]))
    with pytest.raises(IndexError, match="token"):
        NativeSampling().logprobs(torch.zeros(1, 4), torch.tensor([4]), 0)


@settings(max_examples=40, deadline=None)
@given(st.data(), VOCAB_SIZES, st.sampled_from([0, 1, 5, 20, 1000]))
def test_logprobs_equal_torch(data: st.DataObject, vocab_size: int, num_top: int) -> None:
    logits = data.draw(_logits(3, vocab_size, (-np.inf, 1e30)))
    given = torch.tensor(data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=3, max_size=3)))
    ids, logprobs, ranks = NativeSampling().logprobs(logits, given, num_top)
    torch_ids, torch_logprobs, torch_ranks = TorchSampling().logprobs(logits, given, num_top)
    assert ids.shape == torch_ids.shape
    assert ids[:, 0].equal(given)
    torch.testing.assert_close(logprobs, torch_logprobs, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert logits.gather(1, ids).equal(logits.gather(1, torch_ids)), "the same values; ties may differ"
    assert ranks.equal(torch_ranks)
    order = [sorted(range(vocab_size), key=lambda i, row=row: (-row[i], i)) for row in logits.tolist()]
    assert ids[:, 1:].tolist() == [ranking[: ids.shape[1] - 1] for ranking in order]


def test_logprobs_of_a_row_with_nan_are_nan() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 2.0, 1.0]])
    ids, logprobs, _ = NativeSampling().logprobs(logits, torch.tensor([0, 1]), 2)
    assert logprobs[0].isnan().all()
    assert ids.tolist() == [[0, 1, 2], [1, 1, 2]]
    expected = torch.tensor([2.0, 2.0, 1.0]) - logits[1].logsumexp(0)
    torch.testing.assert_close(logprobs[1], expected)
