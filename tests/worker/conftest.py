"""Fixtures for tests of the sampler."""

from __future__ import annotations

import pytest

from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.sampling import SamplingKernels
from chairlift.worker.torch_sampling import TorchSampling
from support.native import unavailable_reason


@pytest.fixture(params=["torch", "native"], scope="module")
def sampling(request: pytest.FixtureRequest) -> SamplingKernels:
    """Every implementation of the sampling kernels."""
    if request.param == "torch":
        return TorchSampling()
    if reason := unavailable_reason():
        pytest.skip(reason)
    return NativeSampling()
