"""Fixtures for tests of the sampler."""

from __future__ import annotations

import pytest

from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.sampling import SamplingKernels
from chairlift.worker.torch_sampling import TorchSampling
from native import why_not


@pytest.fixture(params=["torch", "native"], scope="module")
def sampling(request: pytest.FixtureRequest) -> SamplingKernels:
    """Every way to choose a token."""
    if request.param == "torch":
        return TorchSampling()
    if reason := why_not():
        pytest.skip(reason)
    return NativeSampling()
