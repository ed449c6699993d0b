"""The requests of a workload, and their order if some follow others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.errors import ConfigError
from chairlift.slo import SLO


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload, with the length that its output is forced to.

    Attributes:
        request_id: unique in its workload.
        arrival: seconds after the start of the workload or, with `after`, after the end of that request.
        prompt_token_ids: any sequence of ints; trace readers use `bytes` (ids below 256), an eighth of a list's memory.
        output_len: number of output tokens that the request produces.
        max_tokens: the declared maximum number of output tokens, >= output_len; None: exactly output_len.
        after: the id of the request that has to finish first.
        carries_history: the prompt is the prompt of `after`, its output, and then prompt_token_ids.
        priority: smaller values are scheduled first under the priority policy.
        tenant: the fair policy shares the engine between tenants.
        slo: its service level objectives.

    Raises:
        ConfigError: a value is outside these bounds.
    """

    request_id: str
    arrival: float
    prompt_token_ids: Sequence[int]
    output_len: int
    max_tokens: int | None = None
    after: str | None = None
    carries_history: bool = False
    priority: int = 0
    tenant: str = ""
    slo: SLO | None = None

    def __post_init__(self) -> None:
        if not (self.arrival >= 0 and math.isfinite(self.arrival)):
            raise self._error(f"arrival must be a number of seconds >= 0, got {self.arrival}")
        if self.output_len < 1:
            raise self._error(f"output_len must be at least 1, got {self.output_len}")
        if self.max_tokens is not None and self.max_tokens < self.output_len:
            raise self._error(f"max_tokens must be at least output_len={self.output_len}, got {self.max_tokens}")
        if self.carries_history and self.after is None:
            raise self._error("carries_history needs `after`, the request whose prompt and output it carries")
        if not self.prompt_token_ids and not self.carries_history:
            raise self._error("prompt_token_ids must hold at least one token")

    @property
    def max_output_len(self) -> int:
        """The declared maximum number of output tokens."""
        return self.output_len if self.max_tokens is None else self.max_tokens

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"workload request {self.request_id!r}: {problem}")


def successors_by_id(requests: Sequence[WorkloadRequest]) -> dict[str, list[WorkloadRequest]]:
    """Returns the requests that name another one in `after`, by the id of that one, in the given order."""
    successors: dict[str, list[WorkloadRequest]] = {}
    for request in requests:
        if request.after is not None:
            successors.setdefault(request.after, []).append(request)
    return successors


def dependency_order(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Returns the requests such that each follows the one that it names in `after`.

    Requests without `after` keep their order, and all successors of one come before the next.

    Raises:
        ConfigError: two requests have the same id, or `after` names no request or forms a cycle.
    """
    known = Counter(request.request_id for request in requests)
    if len(known) < len(requests):
        raise ConfigError(f"workload: request id {known.most_common(1)[0][0]!r} occurs more than once")
    for request in requests:
        if request.after is not None and request.after not in known:
            raise ConfigError(f"workload request {request.request_id!r}: `after` names no request: {request.after!r}")
    successors = successors_by_id(requests)
    ordered: list[WorkloadRequest] = []
    reached = [request for request in reversed(requests) if request.after is None]
    while reached:
        ordered.append(reached.pop())
        reached += reversed(successors.pop(ordered[-1].request_id, []))
    if successors:
        raise ConfigError(f"workload request {next(iter(successors))!r} can never arrive: its `after` forms a cycle")
    return ordered


def full_prompt_lens(requests: Sequence[WorkloadRequest]) -> dict[str, int]:
    """Returns the prompt length of each request when it arrives, including its history, by id.

    Raises:
        ConfigError: as `dependency_order`.
    """
    lens: dict[str, int] = {}
    output_lens = {request.request_id: request.output_len for request in requests}
    for request in dependency_order(requests):
        lens[request.request_id] = len(request.prompt_token_ids)
        if request.carries_history and request.after is not None:
            lens[request.request_id] += lens[request.after] + output_lens[request.after]
    return lens
