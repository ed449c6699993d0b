"""PendingStep: a step whose results are being copied to the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import torch

from chairlift.outputs import ModelRunnerOutput, TokenLogprobs
from chairlift.worker.sampler import LogprobTensors, SampledTokens


@dataclass(frozen=True, slots=True)
class PromptLogprobTensors:
    """Logprobs of prompt tokens of one step; a span is (request id, first position, number of entries)."""

    spans: list[tuple[str, int, int]]
    logprobs: LogprobTensors

    def to_host(self) -> PromptLogprobTensors:
        return PromptLogprobTensors(self.spans, self.logprobs.to_host())

    def records(self) -> dict[str, tuple[int, list[TokenLogprobs]]]:
        entries = iter(self.logprobs.records())
        return {request_id: (first, list(islice(entries, count))) for request_id, first, count in self.spans}


@dataclass(slots=True)
class PendingStep:
    """The results of a step, which its parts add.

    Attributes:
        request_ids: the requests that sampled a token, in batch order.
        rounds: their tokens: first one for each request, then one more for each request whose draft token was accepted,
            and so on.
        pooled: the vectors of requests that generate no tokens.
        ready: None if the results are on the host already.
    """

    step: int
    request_ids: list[str] = field(default_factory=list)
    rounds: list[SampledTokens] = field(default_factory=list)
    prompt_logprobs: PromptLogprobTensors | None = None
    pooled: dict[str, bytes] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None

    def copy_to_host(self, device: torch.device) -> None:
        """Start the copies to the host; on the CPU nothing is copied."""
        if device.type != "cuda":
            return
        self.rounds = [sampled.to_host() for sampled in self.rounds]
        self.prompt_logprobs = self.prompt_logprobs and self.prompt_logprobs.to_host()
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.ready.record(torch.cuda.current_stream(device))

    def wait(self) -> ModelRunnerOutput:
        """Wait for the results."""
        if self.ready is not None:
            self.ready.synchronize()
        prompt_logprobs = self.prompt_logprobs.records() if self.prompt_logprobs else {}
        if not self.rounds:
            return ModelRunnerOutput(self.step, {}, prompt_logprobs=prompt_logprobs, pooled=self.pooled)
        request_ids, sampled = self.request_ids, self.rounds[0]
        result = ModelRunnerOutput(
            step=self.step,
            token_ids={rid: [token] for rid, token in zip(request_ids, sampled.token_ids.tolist(), strict=True)},
            logprobs={request_ids[i]: [record] for i, record in sampled.logprob_records().items()},
            prompt_logprobs=prompt_logprobs,
            errors={request_ids[i]: error for i, error in sampled.errors.items()},
        )
        for tokens in self.rounds[1:]:
            records = tokens.logprob_records()
            for i, (position, token) in enumerate(zip(tokens.positions, tokens.token_ids.tolist(), strict=True)):
                if i in tokens.errors:  # The next step reports this error.
                    continue
                result.token_ids[request_ids[position]].append(token)
                if i in records:
                    result.logprobs[request_ids[position]].append(records[i])
        return result
