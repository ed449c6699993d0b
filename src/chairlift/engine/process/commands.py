"""The commands that a front end sends to an engine core, in the same process or in another one."""

from __future__ import annotations

from typing import Final

import msgspec

from chairlift.engine.input_processor import EngineRequest
from chairlift.lora import LoRARequest
from chairlift.request import FinishReason

TOKENS_PER_REQUEST: Final = 128
"""The cost of reading a request without its prompt, in prompt tokens."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queues sibling requests, which share everything but their ids and seeds.

    Attributes:
        first: the first request.
        others: request id and seed of each other one.
    """

    first: EngineRequest
    others: list[tuple[str, int]] = []

    @classmethod
    def from_siblings(cls, requests: list[EngineRequest]) -> Add:
        """Create the command from siblings."""
        first, *others = requests
        return cls(first, [(request.request_id, request.seed) for request in others])

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.first.prompt_token_ids)

    @property
    def cost(self) -> int:
        """The cost of reading the command, in prompt tokens that take about as long to read."""
        num_requests = 1 + len(self.others)
        return num_requests * (self.num_prompt_tokens + TOKENS_PER_REQUEST) + self.first.sampling_params.size

    def requests(self) -> list[EngineRequest]:
        """The requests, the first one first."""
        return self.first.siblings(self.others)


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Aborts requests."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Loads a LoRA adapter; answered by an AdapterResult."""

    module: LoRARequest


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Frees the memory of a LoRA adapter that no request uses; answered by an AdapterResult."""

    lora_id: int


class AdapterResult(msgspec.Struct, frozen=True, array_like=True, tag="adapter_result"):
    """The answer to LoadAdapter and UnloadAdapter. `error` is the reason why an adapter was not loaded, or None."""

    lora_id: int
    error: str | None = None


class ChargeTenants(msgspec.Struct, frozen=True, array_like=True, tag="charge_tenants"):
    """Charges tenants under fair sharing.

    Attributes:
        service: by tenant, what other engines gave since the last command, in the unit of `FairQueue`.
    """

    service: dict[str, float]


class ReopenFiles(msgspec.Struct, frozen=True, array_like=True, tag="reopen_files"):
    """Reopens the event log and the trace file."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the loop of the engine core; unfinished requests get no further output."""


Command = Add | Abort | LoadAdapter | UnloadAdapter | ChargeTenants | ReopenFiles | Stop
