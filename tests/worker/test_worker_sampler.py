"""The sampler and its random streams."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from worker_fakes import (
    SamplerBench,
    new_request,
    reference_logits,
    reference_sample,
    reference_uniform,
    reference_weights,
)

from chairlift.kernels.sampling import SamplingKernels
from chairlift.outputs import NewRequest
from chairlift.sampling_params import SamplingParams
from chairlift.worker.random_stream import stream_key, uniform

NUM_DRAWS = 1500
LOGITS = torch.tensor([1.0, 0.3, -0.5, 2.0, 1.7, -3.0, 0.9, 0.0, 1.2, -1.0, 0.6, -0.2])

DISTRIBUTIONS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=5.0),
    "top_k": SamplingParams(top_k=4),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.3),
    "filters": SamplingParams(temperature=1.5, top_k=7, top_p=0.85, min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "penalties and filters": SamplingParams(temperature=0.9, top_k=6, top_p=0.95, frequency_penalty=-0.4),
    "bias": SamplingParams(logit_bias={5: 4.0, 3: -100.0}),
    "min_tokens": SamplingParams(min_tokens=9),
}


@pytest.mark.parametrize("params", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_draws_follow_the_distribution(sampling: SamplingKernels, params: SamplingParams) -> None:
    requests = [
        new_request(str(seed), [3, 5, 3, 0, 3], params, num_prompt=2, seed=seed, stop=[3]) for seed in range(NUM_DRAWS)
    ]
    bench = SamplerBench(requests, len(LOGITS), sampling)
    draws = bench.sample(LOGITS.repeat(NUM_DRAWS, 1), [request.request_id for request in requests])
    weights = reference_weights(params, reference_logits(requests[0], LOGITS.numpy()))
    observed = np.bincount(draws, minlength=len(LOGITS))
    assert not observed[weights == 0].any()
    kept = weights > 0
    expected = weights[kept] / weights[kept].sum() * NUM_DRAWS
    assert stats.chisquare(observed[kept], expected).pvalue > 1e-3


def test_the_reference_sampler_matches_sets_computed_by_hand() -> None:
    """The reference sampler, which the other tests compare with, keeps the sets that were computed by hand."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    kept = {
        "top_k": (SamplingParams(top_k=2), [0, 1]),
        "ties": (SamplingParams(top_k=3), [0, 1, 2, 3]),
        "top_p": (SamplingParams(top_p=0.7), [0, 1]),
        "top_p after top_k": (SamplingParams(top_k=2, top_p=0.6), [0]),
        "min_p": (SamplingParams(min_p=0.4), [0, 1]),
    }
    for params, expected in kept.values():
        assert np.flatnonzero(reference_weights(params, logits)).tolist() == expected


VOCAB = 40


@st.composite
def _params(draw: st.DrawFn) -> SamplingParams:
    tokens = st.integers(0, VOCAB - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0, 0.3, 1.7, 1e-6, 1e-30, 50.0])),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 2, 5, VOCAB - 1, VOCAB, 10 * VOCAB])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.93])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -1.1, 0.6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 1.9, -0.2])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, 3.0, 100.0]), max_size=3)),
        max_tokens=None,
        min_tokens=draw(st.integers(0, 6)),
    )


@st.composite
def _requests(draw: st.DrawFn) -> list[NewRequest]:
    tokens = st.integers(0, VOCAB - 1)
    requests = []
    for i in range(draw(st.integers(1, 7))):
        token_ids = draw(st.lists(tokens, min_size=1, max_size=12))
        requests.append(
            new_request(
                str(i),
                token_ids,
                draw(_params()),
                num_prompt=draw(st.integers(1, len(token_ids))),
                seed=draw(st.integers(-(1 << 63), (1 << 64) - 1)),
                stop=draw(st.lists(tokens, max_size=3)),
            )
        )
    return requests


def _random_logits(seed: int, num_rows: int, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=40, deadline=None)
@given(_requests(), st.integers(0, 1 << 32))
def test_the_sampler_equals_the_reference(sampling: SamplingKernels, requests: list[NewRequest], seed: int) -> None:
    logits = _random_logits(seed, len(requests))
    sampled = SamplerBench(requests, VOCAB, sampling).sample(logits, [request.request_id for request in requests])
    assert sampled == [reference_sample(request, logits[i].numpy()) for i, request in enumerate(requests)]


@settings(max_examples=25, deadline=None)
@given(_requests(), st.integers(0, 1 << 32), st.randoms(use_true_random=False))
def test_the_sampled_token_does_not_depend_on_the_batch(
    sampling: SamplingKernels, requests: list[NewRequest], seed: int, shuffler: random.Random
) -> None:
    logits = _random_logits(seed, len(requests))
    alone = [
        SamplerBench([request], VOCAB, sampling).sample(logits[i : i + 1], [request.request_id])[0]
        for i, request in enumerate(requests)
    ]
    order = list(range(len(requests)))
    shuffler.shuffle(order)
    crowd = SamplerBench([requests[i] for i in order], VOCAB, sampling, spare_rows=2)
    shuffler.shuffle(order)
    assert crowd.sample(logits[order], [str(i) for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [0, 300])
def test_flat_and_steep_rows_do_not_affect_each_other(sampling: SamplingKernels, spread: float, top_k: int) -> None:
    """The nucleus of a flat row exceeds the sorted tokens, that of a steep row does not."""
    vocab_size = 5003
    params = [SamplingParams(temperature=t, top_p=p, top_k=top_k) for t in (0.5, 1.0, 3.0) for p in (0.1, 0.9, 0.999)]
    params += [SamplingParams(top_k=50), SamplingParams(), SamplingParams(temperature=0), SamplingParams(min_p=0.2)]
    requests = [new_request(str(i), [1, 2, 3], p, seed=i) for i, p in enumerate(params)]
    logits = _random_logits(3, len(requests), vocab_size) * spread
    sampled = SamplerBench(requests, vocab_size, sampling).sample(logits, [request.request_id for request in requests])
    assert sampled == [reference_sample(request, logits[i].numpy()) for i, request in enumerate(requests)]


def test_a_tiny_temperature_is_greedy_and_draws_ties_uniformly(sampling: SamplingKernels) -> None:
    logits = torch.tensor([300.0, -1e30, 300.0, 299.0])
    requests = [new_request(str(i), params=SamplingParams(temperature=5e-324), seed=i) for i in range(200)]
    draws = SamplerBench(requests, 4, sampling).sample(
        logits.repeat(200, 1), [request.request_id for request in requests]
    )
    assert set(draws) == {0, 2}
    assert 60 < draws.count(0) < 140


def test_a_top_p_of_zero_is_greedy(sampling: SamplingKernels) -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, 3.0])
    requests = [new_request(str(i), params=SamplingParams(top_p=0, temperature=2), seed=i) for i in range(20)]
    draws = SamplerBench(requests, 4, sampling).sample(
        logits.repeat(20, 1), [request.request_id for request in requests]
    )
    assert draws == [1] * 20


def test_equally_likely_tokens_are_kept_or_dropped_together(sampling: SamplingKernels) -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, -2.0])
    for params in (SamplingParams(top_k=2), SamplingParams(min_p=1.0)):
        requests = [new_request(str(i), params=params, seed=i) for i in range(100)]
        draws = SamplerBench(requests, 5, sampling).sample(
            logits.repeat(100, 1), [request.request_id for request in requests]
        )
        assert set(draws) == {1, 2, 3}


def test_top_p_keeps_as_few_of_equally_likely_tokens_as_it_needs(sampling: SamplingKernels) -> None:
    equal = torch.tensor([-5.0, 1.0, 1.0, 1.0, 1.0])
    for logits, top_p, kept in (
        (equal, 0.3, {1, 2}),
        (equal, 0.7, {1, 2, 3}),
        (torch.zeros(10), 0.3, {0, 1, 2}),
        (torch.tensor([0.0, 2.0, 0.0, 0.0]), 0.8, {0, 1}),
    ):
        requests = [new_request(str(i), params=SamplingParams(top_p=top_p), seed=i) for i in range(200)]
        draws = SamplerBench(requests, len(logits), sampling).sample(
            logits.repeat(200, 1), [request.request_id for request in requests]
        )
        assert set(draws) == kept


@pytest.mark.parametrize("temperature", [0.0, 1e-20, 1.0, 100.0])
def test_the_only_unmasked_token_is_sampled(sampling: SamplingKernels, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, min_tokens=2, repetition_penalty=1.7)
    request = new_request("a", [0], params, stop=[token for token in range(VOCAB) if token != 23])
    assert SamplerBench([request], VOCAB, sampling).sample(_random_logits(0, 1), ["a"]) == [23]


def test_a_reused_row_keeps_no_state_of_its_last_request(sampling: SamplingKernels) -> None:
    params = SamplingParams(temperature=0, logit_bias={7: 100.0}, min_tokens=5, repetition_penalty=50.0, logprobs=2)
    bench = SamplerBench([new_request("old", [9], params, stop=[9])], VOCAB, sampling)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    assert bench.sample(logits, ["old"]) == [7]
    bench.state.remove(bench.rows.remove("old"))
    request = new_request("new", [9], SamplingParams(temperature=0))
    row = bench.rows.add(request)
    bench.state.add(row, request)
    sampled = bench.sampler.sample(logits.clone(), np.array([row]))
    assert sampled.token_ids.tolist() == [9]
    assert sampled.logprob_records() == {}


@settings(max_examples=30, deadline=None)
@given(_requests(), st.integers(0, 1 << 32), st.lists(st.none() | st.integers(0, 5), min_size=7, max_size=7))
def test_logprobs_are_of_the_raw_distribution(
    sampling: SamplingKernels, requests: list[NewRequest], seed: int, wanted: list[int | None]
) -> None:
    requests = [_with_logprobs(request, k) for request, k in zip(requests, wanted, strict=False)]
    logits = _random_logits(seed, len(requests))
    bench = SamplerBench(requests, VOCAB, sampling)
    sampled = bench.sampler.sample(logits.clone(), bench.rows.rows_of([r.request_id for r in requests]))
    records = sampled.logprob_records()
    assert sorted(records) == [i for i in range(len(requests)) if wanted[i] is not None]
    expected = logits.double().log_softmax(dim=1)
    for i, record in records.items():
        order = expected[i].argsort(descending=True).tolist()
        token = int(sampled.token_ids[i])
        assert record.token.token_id == token
        assert record.token.logprob == pytest.approx(float(expected[i, token]), abs=1e-5)
        assert record.token.rank == order.index(token) + 1
        assert [entry.token_id for entry in record.top] == order[: wanted[i]]
        assert [entry.rank for entry in record.top] == list(range(1, len(record.top) + 1))
        assert [entry.logprob for entry in record.top] == pytest.approx(
            expected[i, order[: wanted[i]]].tolist(), abs=1e-5
        )


def _with_logprobs(request: NewRequest, wanted: int | None) -> NewRequest:
    return replace(request, sampling_params=replace(request.sampling_params, logprobs=wanted))


def test_equally_likely_tokens_share_a_rank(sampling: SamplingKernels) -> None:
    request = new_request("a", params=SamplingParams(temperature=0, logprobs=4, logit_bias={3: 100}))
    bench = SamplerBench([request], 4, sampling)
    sampled = bench.sampler.sample(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), np.array([0]))
    record = sampled.logprob_records()[0]
    assert (record.token.token_id, record.token.rank) == (3, 3)
    assert [entry.rank for entry in record.top] == [1, 1, 3, 3]


def _stream(seed: int, positions: np.ndarray) -> np.ndarray:
    return uniform(np.full(len(positions), stream_key(seed)), positions)


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 1 << 40))
def test_uniform_equals_a_computation_with_python_integers(seed: int, position: int) -> None:
    drawn = _stream(seed, np.array([position]))
    assert drawn.tolist() == [reference_uniform(seed, position)]
    assert 0 <= drawn[0] < 1


@pytest.mark.parametrize("seed", [0, 1, 12345, -1])
def test_draws_along_a_sequence_are_uniform(seed: int) -> None:
    draws = _stream(seed, np.arange(20000))
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_draws_across_seeds_are_uniform() -> None:
    keys = np.array([stream_key(seed) for seed in range(20000)])
    draws = uniform(keys, np.full(len(keys), 17))
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_streams_of_consecutive_seeds_differ_and_draws_are_below_their_total() -> None:
    golden = 0x9E3779B97F4A7C15
    first, second = _stream(5, np.arange(1000)), _stream(5 + golden, np.arange(1000))
    assert not np.intersect1d(first, second).size
    largest = 1 - 2.0**-52
    for total in (1.0, 1.5, 3.0, np.nextafter(2.0, 1.0), 1e-30, 151936.0):
        assert total * largest < total
