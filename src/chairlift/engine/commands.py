"""What a front end tells the engine core. The same records in one process and between two."""

from __future__ import annotations

import msgspec

from chairlift.engine.input_processor import EngineRequest
from chairlift.request import FinishReason


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queue these siblings."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End these requests."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End the loop; unfinished requests get no more."""


Command = Add | Abort | Stop
