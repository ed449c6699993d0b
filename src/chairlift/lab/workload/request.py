"""One request to come."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to come, with the length its output is forced to.

    Attributes:
        request_id: unique in its workload.
        arrival: seconds after the start of the workload or, with `after`, after the end of that request.
        prompt_token_ids: any sequence of ints; readers of traces keep `bytes` (ids below 256), an eighth of a list.
        output_len: output tokens there will be.
        max_tokens: output tokens that the user asks for at most, >= output_len; None: exactly output_len.
        after: the request that has to end first.
        carries_history: the prompt is what `after` had as its prompt, its output, and then prompt_token_ids.
        priority: smaller goes first under the priority policy.
        tenant: whom it is served for; the fair policy shares the engine between tenants.

    Raises:
        ConfigError: a value outside these bounds, with the request's id and the value.
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

    def __post_init__(self) -> None:
        if not (self.arrival >= 0 and math.isfinite(self.arrival)):
            raise self._error(f"arrival must be a number of seconds >= 0, got {self.arrival}")
        if self.output_len < 1:
            raise self._error(f"output_len must be at least 1, got {self.output_len}")
        if self.max_tokens is not None and self.max_tokens < self.output_len:
            raise self._error(f"max_tokens must be at least output_len={self.output_len}, got {self.max_tokens}")
        if self.carries_history and self.after is None:
            raise self._error("carries_history needs `after`: the request whose prompt and output it carries")
        if not self.prompt_token_ids and not self.carries_history:
            raise self._error("prompt_token_ids must hold at least one token")

    @property
    def max_output_len(self) -> int:
        """The output tokens it asks for at most."""
        return self.output_len if self.max_tokens is None else self.max_tokens

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"workload request {self.request_id!r}: {problem}")


def successors_by_id(requests: Sequence[WorkloadRequest]) -> dict[str, list[WorkloadRequest]]:
    """The requests that come `after` another one, by that one's id, in the order given."""
    followers: dict[str, list[WorkloadRequest]] = {}
    for request in requests:
        if request.after is not None:
            followers.setdefault(request.after, []).append(request)
    return followers


def dependency_order(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """The same requests, each behind the one it comes after, and before the next that comes after none.

    Raises:
        ConfigError: two have the same id, or `after` names no request or leads in a circle.
    """
    known = Counter(request.request_id for request in requests)
    if len(known) < len(requests):
        raise ConfigError(f"workload: request id {known.most_common(1)[0][0]!r} occurs more than once")
    for request in requests:
        if request.after is not None and request.after not in known:
            raise ConfigError(f"workload request {request.request_id!r}: `after` names no request: {request.after!r}")
    followers = successors_by_id(requests)
    ordered: list[WorkloadRequest] = []
    reached = [request for request in reversed(requests) if request.after is None]
    while reached:
        ordered.append(reached.pop())
        reached += reversed(followers.pop(ordered[-1].request_id, []))
    if followers:
        raise ConfigError(f"workload request {next(iter(followers))!r} can never arrive: its `after` leads in a circle")
    return ordered


def full_prompt_lens(requests: Sequence[WorkloadRequest]) -> dict[str, int]:
    """Prompt tokens of each request as it will arrive, histories included, by id; for checks that all of them fit.

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
