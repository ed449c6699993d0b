"""A model with known outputs, reference implementations of the sampler, and helpers that create requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.sampling import SamplingKernels
from chairlift.outputs import NewRequest
from chairlift.sampling_params import SamplingParams
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.sampler import Sampler
from chairlift.worker.sampling_state import MIN_TEMPERATURE, SamplingState
from chairlift.worker.token_masks import TokenMasks

MODULUS = 100003
FloatArray = npt.NDArray[np.float32]


def new_request(
    request_id: str,
    token_ids: Sequence[int] = (0,),
    params: SamplingParams | None = None,
    *,
    num_prompt: int | None = None,
    num_computed: int = 0,
    blocks: Sequence[int] = (0,),
    seed: int = 0,
    stop: Sequence[int] = (),
) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        num_computed_tokens=num_computed,
        block_ids=[list(blocks)],
        sampling_params=params or SamplingParams(),
        seed=seed,
        stop_token_ids=list(stop),
    )


class SamplerBench:
    """Request rows with a sampler."""

    def __init__(
        self, requests: Sequence[NewRequest], vocab_size: int, sampling: SamplingKernels, spare_rows: int = 0
    ) -> None:
        max_model_len = max(len(request.token_ids) for request in requests) + 1
        self.rows = RequestRows(len(requests) + spare_rows, max_model_len, 16, torch.device("cpu"))
        self.state = SamplingState(len(requests) + spare_rows, vocab_size)
        self.masks = TokenMasks(self.rows, vocab_size, None)
        self.sampler = Sampler(self.state, self.rows, self.masks, sampling)
        for request in requests:
            row = self.rows.add(request)
            self.state.add(row, request)
            self.masks.add(row, request)

    def sample(self, logits: torch.Tensor, request_ids: Sequence[str]) -> list[int]:
        token_ids: list[int] = self.sampler.sample(
            logits.clone(), self.rows.rows_of(list(request_ids))
        ).token_ids.tolist()
        return token_ids


@cache
def random_logits(vocab_size: int) -> torch.Tensor:
    return torch.randn(MODULUS, vocab_size, generator=torch.Generator().manual_seed(7)) * 2


class FakeModel:
    """A deterministic model: the next token depends on all tokens before it, on their positions and on the content of
    their slots. A step that writes or reads a wrong slot changes all later tokens."""

    def __init__(self, vocab_size: int, num_slots: int) -> None:
        self.vocab_size = vocab_size
        self.memory = torch.full((num_slots,), -1, dtype=torch.int64)
        self.table = random_logits(vocab_size)

    @staticmethod
    def plan(metadata: AttentionMetadata, states: object = None) -> AttentionMetadata:
        assert metadata.query_start_loc.tolist() == metadata.query_start_loc_host
        assert metadata.seq_lens.tolist() == metadata.seq_lens_host
        return metadata

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        self.memory[plan.slot_mapping] = (token_ids + 1) * 7919 + positions
        hidden: list[int] = []
        for i, seq_len in enumerate(plan.seq_lens_host):
            at = torch.arange(seq_len)
            slots = plan.block_tables[i].long()[at // plan.block_size] * plan.block_size + at % plan.block_size
            states = digests(self.memory[slots].tolist())
            hidden += states[seq_len - (plan.query_start_loc_host[i + 1] - plan.query_start_loc_host[i]) :]
        return torch.tensor(hidden)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[:, 0]]

    def logits_of(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits float32 [len(token_ids), V], computed without KV memory."""
        return self.table[digests([(token + 1) * 7919 + position for position, token in enumerate(token_ids)])]


def digests(values: Sequence[int]) -> list[int]:
    """A hash of each prefix of the values."""
    digest, out = 1, []
    for value in values:
        digest = (digest * 31 + value) % MODULUS
        out.append(digest)
    return out


def reference_uniform(seed: int, position: int) -> float:
    mask, gamma = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix((seed + gamma) & mask)
    return (mix((key + (position + 1) * gamma) & mask) >> 12) / 2**52


def reference_logits(request: NewRequest, logits: FloatArray) -> FloatArray:
    """The logits after masks, bias and penalties, computed one token at a time in float32."""
    params, f32 = request.sampling_params, np.float32
    out = logits.copy()
    output = request.token_ids[request.num_prompt_tokens :]
    for token in range(len(out)):
        if token in request.stop_token_ids and len(output) < params.min_tokens:
            out[token] = -np.inf
        out[token] += f32(params.logit_bias.get(token, 0.0))
        if token in request.token_ids:
            penalty = f32(params.repetition_penalty)
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        count = output.count(token)
        out[token] -= f32(params.frequency_penalty) * f32(count)
        out[token] -= f32(params.presence_penalty) * f32(count > 0)
    return out


def reference_weights(params: SamplingParams, logits: FloatArray) -> npt.NDArray[np.float64]:
    """Unnormalised probabilities after temperature, min_p, top_k and top_p. Of tokens that are as likely as the last
    one, top_k keeps all, and top_p the first ones that it needs."""
    scaled = (logits - logits.max()) / np.float32(max(params.temperature, MIN_TEMPERATURE))
    weights: npt.NDArray[np.float64] = np.exp(scaled).astype(np.float64)
    weights[weights < np.float32(params.min_p)] = 0.0
    if 0 < params.top_k < len(weights):
        weights[weights < sorted(weights, reverse=True)[params.top_k - 1]] = 0.0
    if params.top_p < 1:
        target, mass = params.top_p * math.fsum(weights) * (1 - 1e-9), 0.0
        order = sorted(range(len(weights)), key=lambda token: -weights[token])
        for count, token in enumerate(order, 1):
            mass += weights[token]
            if mass >= target:
                weights[order[count:]] = 0.0
                break
    return weights


def reference_sample(request: NewRequest, logits: FloatArray) -> int:
    """Sample the next token of one request with the reference implementation."""
    adjusted = reference_logits(request, logits)
    if request.sampling_params.temperature == 0:
        return int(adjusted.argmax())
    weights = reference_weights(request.sampling_params, adjusted)
    target = reference_uniform(request.seed, len(request.token_ids)) * math.fsum(weights)
    mass = 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > target:
            return token
    raise AssertionError("a uniform number below 1 falls on some token")
