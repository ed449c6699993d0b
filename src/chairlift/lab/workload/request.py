"""The requests of a workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError
from chairlift.sampling_params import SamplingParams
from chairlift.slo import SLO

MAX_NUM_PROMPTS: Final = 1_000_000
"""The largest number of requests that can be set, which take about 5 GB."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload, with the length that its output is forced to.

    Attributes:
        request_id: unique in its workload.
        arrival: seconds after the start of the workload or, with `follows`, after the end of that request.
        prompt_token_ids: any sequence of ints; trace readers use `bytes` (ids below 256), an eighth of a list's memory.
        output_len: number of output tokens that the request produces.
        max_tokens: the declared maximum number of output tokens, >= output_len; None: exactly output_len.
        priority: smaller values are scheduled first under the priority policy.
        tenant: the fair policy shares the engine between tenants.
        slo: its service level objectives.
        is_streamed: as in `SamplingParams`.
        output_token: the only token that is generated; None: any.
        follows: the id of the request after whose end this one is sent; None: it depends on no other.
        continues: the id of an earlier request whose prompt and output precede `prompt_token_ids`.

    Raises:
        ConfigError: a value is outside these bounds.
    """

    request_id: str
    arrival: float
    prompt_token_ids: Sequence[int]
    output_len: int
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    slo: SLO | None = None
    is_streamed: bool = True
    output_token: int | None = None
    follows: str | None = None
    continues: str | None = None

    @property
    def sampling_params(self) -> SamplingParams:
        """Greedy sampling up to the declared maximum, past EOS."""
        return SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=self.max_output_len,
            allowed_token_ids=None if self.output_token is None else [self.output_token],
            slo=self.slo,
            is_streamed=self.is_streamed,
        )

    def __post_init__(self) -> None:
        if not (self.arrival >= 0 and math.isfinite(self.arrival)):
            raise self.error(f"arrival must be a number of seconds >= 0, got {self.arrival}")
        if self.output_len < 1:
            raise self.error(f"output_len must be at least 1, got {self.output_len}")
        if self.max_tokens is not None and self.max_tokens < self.output_len:
            raise self.error(f"max_tokens must be at least output_len={self.output_len}, got {self.max_tokens}")
        if not self.prompt_token_ids:
            raise self.error("prompt_token_ids must hold at least one token")

    @property
    def max_output_len(self) -> int:
        """The declared maximum number of output tokens."""
        return self.output_len if self.max_tokens is None else self.max_tokens

    def error(self, problem: str) -> ConfigError:
        """The error of a wrong field, with the id of the request."""
        return ConfigError(f"workload request {self.request_id!r}: {problem}")


def check_ids(requests: Sequence[WorkloadRequest]) -> None:
    """Raises ConfigError if two requests have the same id, or one follows or continues a request that is not before
    it."""
    known: set[str] = set()
    for request in requests:
        for name in ("follows", "continues"):
            if (earlier := getattr(request, name)) is not None and earlier not in known:
                raise request.error(f"{name}={earlier!r} must be the id of a request before it in the workload")
        if request.request_id in known:
            raise ConfigError(f"workload: request id {request.request_id!r} occurs more than once")
        known.add(request.request_id)
