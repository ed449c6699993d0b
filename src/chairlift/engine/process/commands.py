"""The commands that a front end sends to an engine core, in the same process or in another one."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from chairlift.engine.input_processor import EngineRequest
from chairlift.lora import LoRARequest
from chairlift.request import FinishReason


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queues sibling requests. They share a prompt, which only the first one carries."""

    requests: list[EngineRequest]

    @classmethod
    def from_siblings(cls, requests: list[EngineRequest]) -> Add:
        """Create the command from siblings that all have the prompt; in the command only the first one has it."""
        first, *others = requests
        return cls([first, *(replace(request, prompt_token_ids=[]) for request in others)])

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.requests[0].prompt_token_ids)

    def siblings(self) -> list[EngineRequest]:
        """The requests, each with the prompt."""
        first, *others = self.requests
        return [first, *(replace(request, prompt_token_ids=first.prompt_token_ids) for request in others)]


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


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the loop of the engine core; unfinished requests get no further output."""


Command = Add | Abort | LoadAdapter | UnloadAdapter | ChargeTenants | Stop
