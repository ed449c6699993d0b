"""ModelRunner: an executor on one device, which computes scheduled tokens and samples new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from chairlift.grammar.compiler import GrammarCompiler
from chairlift.kernels.lora import NO_ADAPTER, LoraAdapters
from chairlift.kernels.sampling import SamplingKernels
from chairlift.models.decoder import DecoderModel
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from chairlift.worker.block_copier import BlockCopier
from chairlift.worker.draft_model import DraftHead, DraftModel
from chairlift.worker.encoder_runner import pooled_rows
from chairlift.worker.input_batch import InputBatch, gather_input_batch
from chairlift.worker.memory import PROMPT_LOGPROB_ROWS
from chairlift.worker.request_rows import IntArray, RequestRows, to_device
from chairlift.worker.runner_model import RunnerModel
from chairlift.worker.sampler import LogprobTensors, SampledTokens, Sampler
from chairlift.worker.sampling_state import SamplingFeature, SamplingState
from chairlift.worker.token_masks import TokenMasks
from chairlift.worker.torch_sampling import TorchSampling


class DraftRounds:
    """The order of the logits of a step: those after the last known token of each request, then those after its first
    draft token, and so on.

    Args:
        num_drafts: int64 [N], the number of draft tokens of each request.

    Attributes:
        num_rounds: 1 + the largest number of draft tokens.
        index, position: int64 [N + sum of num_drafts]: for each row of logits the request, and the number of draft
            tokens before it.
        rows: int64 [num_rounds, N], the row of the logits after draft token `round` - 1 of a request.
    """

    def __init__(self, num_drafts: IntArray) -> None:
        self.num_rounds = 1 + int(num_drafts.max(initial=0))
        has_row = np.arange(self.num_rounds)[:, None] <= num_drafts
        self.position, self.index = np.nonzero(has_row)
        self.rows: IntArray = np.cumsum(has_row).reshape(has_row.shape) - 1


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens of one step; a span is (request id, first position, number of entries)."""

    spans: list[tuple[str, int, int]]
    logprobs: LogprobTensors

    def to_host(self) -> PromptLogprobs:
        return PromptLogprobs(self.spans, self.logprobs.to_host())

    def records(self) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        entries = iter(self.logprobs.records())
        return {request_id: (first, list(islice(entries, count))) for request_id, first, count in self.spans}


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose results are being copied to the host.

    Attributes:
        request_ids: the requests that sampled a token, in batch order.
        rounds: their tokens: first one for each request, then one more for each request whose draft token was accepted,
            and so on.
        ready: None if the results are on the host already.
        pooled: the vectors of requests that generate no tokens.
    """

    step: int
    request_ids: list[str]
    rounds: list[SampledTokens]
    prompt_logprobs: PromptLogprobs | None = None
    ready: torch.cuda.Event | None = None
    pooled: dict[str, bytes] = field(default_factory=dict)


class ModelRunner:
    """Runs steps on one device. `submit` returns without waiting for the device; `result` waits.

    Two steps may overlap: the tokens that step k samples are written to the request rows on the device, where step k +
    1 reads them, so it may be submitted before the `result` of step k.

    Args:
        model: a model with allocated KV memory.
        vocab_size: the number of logits, V.
        max_num_seqs: maximum number of concurrent requests.
        max_model_len: maximum number of prompt and output tokens of a request.
        block_size: slots in each block.
        device: the device of the model; None selects the CPU.
        sampling: the kernels that choose tokens; None selects those of torch.
        grammars: the compiler of structured outputs; None if the engine does not support them.
        num_groups: number of groups of layers (see `models.kv_layout.KVLayout`).
        pooler: computes the vectors [N, size] from the hidden states [N, hidden_size] of the last tokens of requests,
            which then sample nothing; None for a model that generates text.
        draft_model: a model that proposes draft tokens, whose KV memory has as many blocks of the same size; None if
            there is none. It needs `num_groups` = 1. draft_has_states: as `has_states`.
        predicting_model: the model, if its predictor proposes draft tokens.
        lora: the LoRA adapters of the model; None if it has none.
        has_states: whether layers have recurrent state, of which the model has a slot for each row, each of
            `num_draft_states` draft tokens of a step, and each checkpoint, in this order.
        block_copier: makes the copies of blocks before a step; None if the scheduler plans none.
    """

    def __init__(
        self,
        model: RunnerModel,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device | None = None,
        sampling: SamplingKernels | None = None,
        grammars: GrammarCompiler | None = None,
        num_groups: int = 1,
        draft_model: RunnerModel | None = None,
        pooler: Callable[[torch.Tensor], torch.Tensor] | None = None,
        lora: LoraAdapters | None = None,
        has_states: bool = False,
        draft_has_states: bool = False,
        num_draft_states: int = 0,
        predicting_model: DecoderModel | None = None,
        block_copier: BlockCopier | None = None,
    ) -> None:
        self._block_copier = block_copier
        self._has_states = has_states
        self._pooler = pooler
        self._model = model
        self._lora = lora
        self._device = device or torch.device("cpu")
        self._rows = RequestRows(max_num_seqs, max_model_len, block_size, self._device, num_groups, num_draft_states)
        self._state = SamplingState(max_num_seqs, vocab_size)
        self._sampling = sampling or TorchSampling()
        self._masks = TokenMasks(self._rows, vocab_size, grammars)
        self._sampler = Sampler(self._state, self._rows, self._masks, self._sampling)
        choose = self._sampling.make_sampler(self._state.parameters(self._rows.num_tokens))
        self._draft_head = None if predicting_model is None else DraftHead(predicting_model, choose, self._rows)
        self._draft_model: DraftModel | None = None
        if draft_model is not None:
            self._draft_model = DraftModel(draft_model, choose, self._rows, draft_has_states)

    @torch.inference_mode()
    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start a step."""
        self._update_rows(output)
        if self._block_copier is not None:
            self._block_copier.copy(output)
        if not output.num_scheduled_tokens:
            return PendingStep(output.step, [], [])
        drafts = self._draft_tokens(output)
        batch = gather_input_batch(
            self._rows,
            output.num_scheduled_tokens,
            output.num_padding_tokens,
            drafts,
            output.checkpoints if self._has_states else None,
        )
        if self._lora is not None:
            num_tokens = np.diff(batch.token_end, prepend=0)
            self._lora.batch.set_slots(np.repeat(self._rows.lora_slots[batch.rows], num_tokens))
        plan = self._model.plan(*batch.attention, states=batch.states)
        first = self._rows.num_computed_tokens[batch.rows]
        hidden = self._model.forward(batch.token_ids, batch.positions, plan)
        prompt_logprobs = self._prompt_logprobs(batch, hidden) if self._state.num_with_features else None
        self._rows.advance(batch.rows, batch.num_scheduled - batch.num_drafts if drafts else batch.num_scheduled)
        if self._pooler is not None:
            return self._pool(output.step, batch, hidden, self._pooler)
        num_computed = self._rows.num_computed_tokens[batch.rows]
        request_ids, rounds = self._sample(batch, hidden, drafts)
        num_accepted = self._rows.num_computed_tokens[batch.rows] - num_computed
        if self._draft_head is not None:
            self._draft_head.read(batch, hidden, plan, first, num_accepted)
        if self._has_states and drafts:
            self._rows.keep_states(batch.rows, batch.num_drafts, num_accepted)
        if self._draft_model is not None and drafts:
            self._draft_model.discard_rejected(drafts)
        return self._copy_to_host(PendingStep(output.step, request_ids, rounds, prompt_logprobs))

    def _pool(
        self, step: int, batch: InputBatch, hidden: torch.Tensor, pooler: Callable[[torch.Tensor], torch.Tensor]
    ) -> PendingStep:
        """Compute the vectors of the requests whose last token was computed."""
        chosen = np.flatnonzero(batch.samples)
        if not len(chosen):
            return PendingStep(step, [], [])
        rows = pooler(hidden[to_device(batch.token_end[chosen] - 1, self._device)])
        return PendingStep(step, [], [], pooled=pooled_rows([batch.request_ids[i] for i in chosen.tolist()], rows))

    def result(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for the results of a step."""
        if pending.ready is not None:
            pending.ready.synchronize()
        prompt = pending.prompt_logprobs
        if not pending.rounds:
            prompt_logprobs = prompt.records() if prompt else {}
            return ModelRunnerOutput(pending.step, {}, prompt_logprobs=prompt_logprobs, pooled=pending.pooled)
        request_ids, sampled = pending.request_ids, pending.rounds[0]
        result = ModelRunnerOutput(
            step=pending.step,
            token_ids={rid: [token] for rid, token in zip(request_ids, sampled.token_ids.tolist(), strict=True)},
            logprobs={request_ids[i]: [record] for i, record in sampled.logprob_records().items()},
            prompt_logprobs=prompt.records() if prompt else {},
            errors={request_ids[i]: error for i, error in sampled.errors.items()},
        )
        for tokens in pending.rounds[1:]:
            records = tokens.logprob_records()
            for i, (position, token) in enumerate(zip(tokens.positions, tokens.token_ids.tolist(), strict=True)):
                if i in tokens.errors:  # The next step reports this error.
                    continue
                result.token_ids[request_ids[position]].append(token)
                if i in records:
                    result.logprobs[request_ids[position]].append(records[i])
        return result

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.removed:
            row = self._rows.remove(request_id)
            self._masks.remove(row)
            self._state.remove(row)
        if output.beams:
            self._rows.move_beams(output.beams)
        for new in output.new_requests:
            row = self._rows.add(new)
            self._rows.lora_slots[row] = NO_ADAPTER if self._lora is None else self._lora.slot_of(new.lora_id)
            self._state.add(row, new)
            self._masks.add(row, new)
            if self._draft_model is not None:
                self._draft_model.add(row)
        for request_id, block_ids in output.new_block_ids.items():
            self._rows.append_blocks(self._rows.row_of(request_id), block_ids)

    def _draft_tokens(self, output: SchedulerOutput) -> Mapping[str, list[int]]:
        """The draft tokens of the step, which are written to the rows."""
        if output.num_draft_reads:
            assert self._draft_model is not None
            self._draft_model.read(output.num_draft_reads)
        if output.num_draft_tokens:
            proposer = self._draft_head or self._draft_model
            assert proposer is not None
            return proposer.propose(output.num_draft_tokens)
        for request_id, token_ids in output.draft_token_ids.items():
            self._rows.write_drafts(self._rows.row_of(request_id), token_ids)
        return output.draft_token_ids

    def _sample(
        self, batch: InputBatch, hidden: torch.Tensor, drafts: Mapping[str, list[int]]
    ) -> tuple[list[str], list[SampledTokens]]:
        """Sample for the requests whose last known token was computed, and append the tokens to their rows.

        The logits of padded rows are computed as well, as in a padded batch, and ignored.
        """
        if batch.is_decode:
            sampled = self._sampler.sample(self._model.logits(hidden), batch.rows)
            self._rows.append_sampled(batch.rows, sampled.token_ids)
            return batch.request_ids, [sampled]
        chosen = np.flatnonzero(batch.samples)
        padded = np.flatnonzero(batch.is_padded)
        if not len(chosen) and not len(padded):
            return [], []
        ends, rounds = batch.token_end - batch.num_drafts, DraftRounds(batch.num_drafts[chosen])
        sampled_rows = ends[chosen[rounds.index]] + rounds.position - 1
        packed = np.concatenate((sampled_rows, ends[padded] - 1))
        if len(padded) or len(drafts) or len(packed) < len(hidden):
            hidden = hidden[to_device(packed, self._device)]
        logits = self._model.logits(hidden)
        if not len(chosen):
            return [], []
        request_ids = [batch.request_ids[i] for i in chosen.tolist()]
        token_ids = [drafts.get(request_id, []) for request_id in request_ids]
        return request_ids, self._verify(logits, batch.rows[chosen], rounds, token_ids)

    def _verify(
        self, logits: torch.Tensor, rows: IntArray, rounds: DraftRounds, drafts: list[list[int]]
    ) -> list[SampledTokens]:
        """Sample after the last known token of each row, and go on after each draft token that equals the token sampled
        before it.

        Args:
            logits: float32 [at least N + the number of draft tokens, V], in the order of `rounds`; overwritten.
            rows: int64 [N].
            drafts: the draft tokens of each row.
        """
        sampled = [self._sampler.sample(logits[: len(rows)], rows)]
        self._rows.append_sampled(rows, sampled[0].token_ids)
        index = list(range(len(rows)))
        for position in range(1, rounds.num_rounds):
            tokens = sampled[-1]
            values = zip(index, tokens.token_ids.tolist(), strict=True)
            index = [
                i
                for at, (i, token) in enumerate(values)
                if drafts[i][position - 1 : position] == [token] and at not in tokens.errors
            ]
            if not index:
                break
            logits_index = to_device(rounds.rows[position, index], self._device)
            tokens = self._sampler.sample(logits[logits_index], rows[index])
            # A row with an error stays as it is: the next step samples its token again and reports the error.
            valid = [at for at in range(len(index)) if at not in tokens.errors]
            if not valid:
                break
            chosen = rows[index][valid]
            self._rows.advance(chosen, np.ones_like(chosen))
            self._rows.append_sampled(chosen, tokens.token_ids[valid])
            sampled.append(replace(tokens, positions=index))
        return sampled

    def _prompt_logprobs(self, batch: InputBatch, hidden: torch.Tensor) -> PromptLogprobs | None:
        """Compute the logprobs of prompt tokens from the logits at the token before, PROMPT_LOGPROB_ROWS at a time."""
        with_logprobs = np.flatnonzero(self._state.features[batch.rows] & SamplingFeature.PROMPT_LOGPROBS)
        spans: list[tuple[str, int, int]] = []
        num_top: list[int] = []
        hidden_index: list[IntArray] = []
        target_index: list[IntArray] = []
        for i in with_logprobs.tolist():
            row = int(batch.rows[i])
            first = int(self._rows.num_computed_tokens[row]) + 1
            count = min(int(batch.num_scheduled[i]), int(self._rows.num_prompt_tokens[row]) - first)
            if count > 0:
                spans.append((batch.request_ids[i], first, count))
                num_top += [int(self._state.num_prompt_logprobs[row])] * count
                hidden_index.append(batch.token_start[i] + np.arange(count))
                target_index.append(row * self._rows.max_model_len + first + np.arange(count))
        if not spans:
            return None
        hidden_rows = to_device(np.concatenate(hidden_index), self._device)
        targets = self._rows.token_ids.view(-1)[to_device(np.concatenate(target_index), self._device)].long()
        parts = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            piece = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden[hidden_rows[piece]])
            parts.append(self._sampling.logprobs(logits, targets[piece], max(num_top)))
        token_ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
        return PromptLogprobs(spans, LogprobTensors(token_ids, logprobs, ranks, num_top))

    def _copy_to_host(self, done: PendingStep) -> PendingStep:
        """Start the copies to the host; on the CPU nothing is copied."""
        if self._device.type != "cuda":
            return done
        rounds = [sampled.to_host() for sampled in done.rounds]
        prompt = done.prompt_logprobs and done.prompt_logprobs.to_host()
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return PendingStep(done.step, done.request_ids, rounds, prompt, ready)
