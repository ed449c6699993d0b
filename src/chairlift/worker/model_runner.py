"""ModelRunner: an executor on one device, which computes scheduled tokens and samples new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from chairlift.kernels.device_copy import to_device
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.worker.draft_verification import DraftRounds, sample_rounds
from chairlift.worker.input_batch import gather_input_batch
from chairlift.worker.pending_step import PendingStep
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.runner_model import RunnerModel
from chairlift.worker.sampler import SampledTokens, Sampler
from chairlift.worker.step_extension import ComputedStep, DraftProposer, StepExtension


class ModelRunner:
    """Runs steps on one device. `submit` returns without waiting for the device; `result` waits.

    Two steps may overlap: the tokens that step k samples are written to the request rows on the device, where step k +
    1 reads them, so it may be submitted before the `result` of step k.

    Args:
        model: a model with allocated KV memory.
        rows: the rows of the running requests, on the device of the model.
        sampler: samples the tokens; None for a model that generates none.
        extensions: the parts of a step that only some engines have.
        proposer: the extension that proposes draft tokens; None if the scheduler proposes them, or if there are none.
        has_states: whether layers have recurrent state, of which the model has a slot for each row, each draft token
            of a step, and each checkpoint, in this order.
    """

    def __init__(
        self,
        model: RunnerModel,
        rows: RequestRows,
        sampler: Sampler | None,
        extensions: Sequence[StepExtension] = (),
        proposer: DraftProposer | None = None,
        has_states: bool = False,
    ) -> None:
        self._model = model
        self._rows = rows
        self._sampler = sampler
        self._extensions = [*extensions, *([proposer] if proposer is not None else [])]
        self._proposer = proposer
        self._has_states = has_states

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start a step."""
        self._update_rows(output)
        for extension in self._extensions:
            extension.begin(output)
        if not output.num_scheduled_tokens:
            return PendingStep(output.step)
        step = self._compute(output)
        batch = step.batch
        for extension in self._extensions:
            extension.read_hidden(step)
        self._rows.advance(batch.rows, batch.num_scheduled - batch.num_drafts if step.drafts else batch.num_scheduled)
        if self._sampler is not None:
            num_computed = self._rows.num_computed_tokens[batch.rows]
            step.results.request_ids, step.results.rounds = self._sample(step, self._sampler)
            step.num_accepted = self._rows.num_computed_tokens[batch.rows] - num_computed
        if self._has_states and step.drafts:
            self._rows.keep_states(batch.rows, batch.num_drafts, step.num_accepted)
        for extension in self._extensions:
            extension.finish(step)
        step.results.copy_to_host(self._rows.device)
        return step.results

    def result(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for the results of a step."""
        return pending.wait()

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.removed:
            row = self._rows.remove(request_id)
            if self._sampler is not None:
                self._sampler.remove(row)
        if output.beams:
            self._rows.move_beams(output.beams)
        for new in output.new_requests:
            row = self._rows.add(new)
            if self._sampler is not None:
                self._sampler.add(row, new)
            for extension in self._extensions:
                extension.add(row, new)
        for request_id, block_ids in output.new_block_ids.items():
            self._rows.append_blocks(self._rows.row_of(request_id), block_ids)

    def _compute(self, output: SchedulerOutput) -> ComputedStep:
        """Compute the hidden states of a step, which has tokens."""
        drafts = self._draft_tokens(output)
        checkpoints = output.checkpoints if self._has_states else None
        batch = gather_input_batch(
            self._rows, output.num_scheduled_tokens, output.num_padding_tokens, drafts, checkpoints
        )
        for extension in self._extensions:
            extension.prepare(batch)
        plan = self._model.plan(*batch.attention, states=batch.states)
        first_positions = self._rows.num_computed_tokens[batch.rows]
        hidden = self._model.forward(batch.token_ids, batch.positions, plan)
        num_accepted = np.zeros_like(first_positions)
        return ComputedStep(batch, drafts, plan, first_positions, hidden, num_accepted, PendingStep(output.step))

    def _draft_tokens(self, output: SchedulerOutput) -> Mapping[str, list[int]]:
        """The draft tokens of the step, which are written to the rows."""
        if output.num_draft_tokens:
            assert self._proposer is not None
            return self._proposer.propose(output.num_draft_tokens)
        for request_id, token_ids in output.draft_token_ids.items():
            self._rows.write_drafts(self._rows.row_of(request_id), token_ids)
        return output.draft_token_ids

    def _sample(self, step: ComputedStep, sampler: Sampler) -> tuple[list[str], list[SampledTokens]]:
        """Sample for the requests whose last known token was computed, and append the tokens to their rows.

        The logits of padded rows are computed as well, as in a padded batch, and ignored.
        """
        batch, hidden = step.batch, step.hidden
        if batch.is_decode:
            sampled = sampler.sample(self._model.logits(hidden), batch.rows)
            self._rows.append_sampled(batch.rows, sampled.token_ids)
            return batch.request_ids, [sampled]
        chosen = np.flatnonzero(batch.samples)
        padded = np.flatnonzero(batch.is_padded)
        if not len(chosen) and not len(padded):
            return [], []
        ends, rounds = batch.token_end - batch.num_drafts, DraftRounds(batch.num_drafts[chosen])
        sampled_rows = ends[chosen[rounds.index]] + rounds.position - 1
        packed = np.concatenate((sampled_rows, ends[padded] - 1))
        if len(padded) or len(step.drafts) or len(packed) < len(hidden):
            hidden = hidden[to_device(packed, self._rows.device)]
        logits = self._model.logits(hidden)
        if not len(chosen):
            return [], []
        request_ids = [batch.request_ids[i] for i in chosen.tolist()]
        drafts = [step.drafts.get(request_id, []) for request_id in request_ids]
        return request_ids, sample_rounds(sampler, self._rows, batch.rows[chosen], logits, rounds, drafts)
