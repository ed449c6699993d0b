"""ModelRunner: an executor on one device, which computes scheduled tokens and samples new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from chairlift.grammar.compiler import GrammarCompiler
from chairlift.kernels.sampling import SamplingKernels
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from chairlift.worker.input_batch import InputBatch, gather_input_batch
from chairlift.worker.logprobs import LogprobTensors
from chairlift.worker.request_rows import IntArray, RequestRows
from chairlift.worker.sampler import SampledTokens, Sampler
from chairlift.worker.sampling_state import SamplingFeature, SamplingState
from chairlift.worker.token_masks import TokenMasks
from chairlift.worker.torch_sampling import TorchSampling
from chairlift.worker.transfer import to_device

PROMPT_LOGPROB_ROWS = 256
"""Maximum number of rows of logits in memory for prompt logprobs."""


class RunnerModel(Protocol):
    """The methods of a model that the runner calls."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Compute int64 [T], int64 [T] -> hidden states [T, hidden], and write K and V to the slots of the plan."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, hidden] -> float32 [N, V] in a tensor that the caller may change."""
        ...


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens of one step; a span is (request id, first position, number of entries, top tokens)."""

    spans: list[tuple[str, int, int, int]]
    logprobs: LogprobTensors

    def to_host(self) -> PromptLogprobs:
        return PromptLogprobs(self.spans, self.logprobs.to_host())

    def records(self) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        num_top = [top for _id, _first, count, top in self.spans for _ in range(count)]
        entries = iter(self.logprobs.records(num_top))
        return {
            request_id: (first, [next(entries) for _ in range(count)]) for request_id, first, count, _ in self.spans
        }


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose results are being copied to the host; `ready` is None if they are there already."""

    step: int
    request_ids: list[str]
    sampled: SampledTokens | None = None
    prompt_logprobs: PromptLogprobs | None = None
    ready: torch.cuda.Event | None = None


class ModelRunner:
    """Runs steps on one device. `submit` returns without waiting for the device; `result` waits.

    Two steps may overlap: the tokens that step k samples are written to the request rows on the device, where step k +
    1 reads them, so it may be submitted before the `result` of step k.

    Args:
        model: a model with allocated KV memory.
        plan: prepares the attention of one step, for `model.forward`, from the metadata of each group of layers.
        vocab_size: the number of logits, V.
        max_num_seqs: maximum number of concurrent requests.
        max_model_len: maximum number of prompt and output tokens of a request.
        block_size: slots in each block.
        device: the device of the model; None selects the CPU.
        sampling: the kernels that choose tokens; None selects those of torch.
        grammars: the compiler of structured outputs; None if the engine does not support them.
        num_groups: number of groups of layers (see `models.kv_layout.KVLayout`).
    """

    def __init__(
        self,
        model: RunnerModel,
        plan: Callable[..., Any],
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device | None = None,
        sampling: SamplingKernels | None = None,
        grammars: GrammarCompiler | None = None,
        num_groups: int = 1,
    ) -> None:
        self._model = model
        self._plan = plan
        self._device = device or torch.device("cpu")
        self._rows = RequestRows(max_num_seqs, max_model_len, block_size, self._device, num_groups)
        self._state = SamplingState(max_num_seqs, vocab_size)
        self._sampling = sampling or TorchSampling()
        self._masks = TokenMasks(self._rows, vocab_size, grammars)
        self._sampler = Sampler(self._state, self._rows, self._masks, self._sampling)

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start a step."""
        self._update_rows(output)
        if not output.num_scheduled_tokens:
            return PendingStep(output.step, [])
        batch = gather_input_batch(self._rows, output.num_scheduled_tokens, output.num_padding_tokens)
        hidden = self._model.forward(batch.token_ids, batch.positions, self._plan(*batch.attention))
        prompt_logprobs = self._prompt_logprobs(batch, hidden) if self._state.num_with_features else None
        self._rows.advance(batch.rows, batch.num_scheduled)
        request_ids, sampled = self._sample(batch, hidden)
        return self._copy_to_host(PendingStep(output.step, request_ids, sampled, prompt_logprobs))

    def result(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for the results of a step."""
        if pending.ready is not None:
            pending.ready.synchronize()
        sampled, prompt = pending.sampled, pending.prompt_logprobs
        if sampled is None:
            return ModelRunnerOutput(pending.step, {}, prompt_logprobs=prompt.records() if prompt else {})
        token_ids = sampled.token_ids.tolist()
        return ModelRunnerOutput(
            step=pending.step,
            token_ids={request_id: [token] for request_id, token in zip(pending.request_ids, token_ids, strict=True)},
            logprobs={pending.request_ids[i]: [record] for i, record in sampled.logprob_records().items()},
            prompt_logprobs=prompt.records() if prompt else {},
            errors={pending.request_ids[i]: error for i, error in sampled.errors.items()},
        )

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.removed:
            row = self._rows.remove(request_id)
            self._masks.remove(row)
            self._state.remove(row)
        for new in output.new_requests:
            row = self._rows.add(new)
            self._state.add(row, new)
            self._masks.add(row, new)
        for request_id, block_ids in output.new_block_ids.items():
            self._rows.append_blocks(self._rows.row_of(request_id), block_ids)

    def _sample(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[list[str], SampledTokens | None]:
        """Sample for the requests whose last known token was computed, and append the tokens to their rows.

        The logits of padded rows are computed as well, as in a padded batch, and ignored.
        """
        if batch.is_decode:
            sampled = self._sampler.sample(self._model.logits(hidden), batch.rows)
            self._rows.append_sampled(batch.rows, sampled.token_ids)
            return batch.request_ids, sampled
        chosen = np.flatnonzero(batch.samples)
        padded = np.flatnonzero(batch.is_padded)
        if not len(chosen) and not len(padded):
            return [], None
        last = batch.token_end[np.concatenate((chosen, padded))] - 1
        if len(padded) or len(last) < len(hidden):
            hidden = hidden[to_device(last, self._device)]
        logits = self._model.logits(hidden)
        if not len(chosen):
            return [], None
        rows = batch.rows[chosen]
        sampled = self._sampler.sample(logits[: len(chosen)], rows)
        self._rows.append_sampled(rows, sampled.token_ids)
        return [batch.request_ids[i] for i in chosen.tolist()], sampled

    def _prompt_logprobs(self, batch: InputBatch, hidden: torch.Tensor) -> PromptLogprobs | None:
        """Compute the logprobs of prompt tokens from the logits at the token before, PROMPT_LOGPROB_ROWS at a time."""
        with_logprobs = np.flatnonzero(self._state.features[batch.rows] & SamplingFeature.PROMPT_LOGPROBS)
        spans: list[tuple[str, int, int, int]] = []
        hidden_index: list[IntArray] = []
        target_index: list[IntArray] = []
        for i in with_logprobs.tolist():
            row = int(batch.rows[i])
            first = int(self._rows.num_computed_tokens[row]) + 1
            count = min(int(batch.num_scheduled[i]), int(self._rows.num_prompt_tokens[row]) - first)
            if count > 0:
                spans.append((batch.request_ids[i], first, count, int(self._state.num_prompt_logprobs[row])))
                hidden_index.append(batch.token_start[i] + np.arange(count))
                target_index.append(row * self._rows.max_model_len + first + np.arange(count))
        if not spans:
            return None
        hidden_rows = to_device(np.concatenate(hidden_index), self._device)
        targets = self._rows.token_ids.view(-1)[to_device(np.concatenate(target_index), self._device)].long()
        num_top = max(top for *_, top in spans)
        parts = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            piece = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden[hidden_rows[piece]])
            parts.append(LogprobTensors(*self._sampling.logprobs(logits, targets[piece], num_top)))
        return PromptLogprobs(spans, LogprobTensors.concatenate(parts))

    def _copy_to_host(self, done: PendingStep) -> PendingStep:
        """Start the copies to the host; on the CPU nothing is copied."""
        if self._device.type != "cuda":
            return done
        sampled = done.sampled and done.sampled.to_host()
        prompt = done.prompt_logprobs and done.prompt_logprobs.to_host()
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return PendingStep(done.step, done.request_ids, sampled, prompt, ready)
