"""The loop of an engine core, whichever way commands come to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from chairlift.core.engine_core import EngineCore
from chairlift.engine.grammar_gate import GrammarGate
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Abort, Add, Command, Stop
from chairlift.errors import RequestError
from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason

MAX_NEW_TOKENS: Final = 1 << 16
"""Prompt tokens of new requests that are queued between two steps. Reading them takes time, in which no request gets a
token; the others are queued after the step."""

TOKENS_PER_REQUEST: Final = 128
"""The cost of a request itself, in prompt tokens."""


class Inbox(Protocol):
    """Where commands come from."""

    def take(self, wait: bool) -> Command | None:
        """The next one; None if there is none now. With `wait` there is one in the end."""


def run_core(
    core: EngineCore,
    inbox: Inbox,
    tell: Callable[[list[EngineCoreOutput]], None],
    gate: GrammarGate | None = None,
) -> None:
    """Take commands between two steps, and step while there is work, until a Stop arrives.

    Args:
        tell: called with what each step gave, also if that is nothing, and with refusals; must not block.
        gate: keeps requests back whose grammar is not compiled.
    """
    gate = gate or GrammarGate()
    while True:
        num_new_tokens = 0
        while num_new_tokens < MAX_NEW_TOKENS or not core.has_work:
            command = inbox.take(wait=not core.has_work and not gate.is_holding)
            if command is None:
                break
            if isinstance(command, Stop):
                return
            if isinstance(command, Add):
                num_new_tokens += len(command.requests) * (command.num_prompt_tokens + TOKENS_PER_REQUEST)
            if refusals := _handle(core, gate, command):
                tell(refusals)
        if refusals := _add_all(core, gate.released()):
            tell(refusals)
        if gate.is_holding and not core.has_work:
            gate.wait()
        else:
            tell(core.step())


def _handle(core: EngineCore, gate: GrammarGate, command: Add | Abort) -> list[EngineCoreOutput]:
    if isinstance(command, Add):
        siblings = command.siblings()
        return [] if gate.holds(siblings) else _add_all(core, siblings)
    gate.drop(command.request_ids)
    for request_id in command.request_ids:
        core.abort(request_id, command.reason)
    return []


def _add_all(core: EngineCore, requests: list[EngineRequest]) -> list[EngineCoreOutput]:
    return [refusal for request in requests if (refusal := _add(core, request)) is not None]


def _add(core: EngineCore, request: EngineRequest) -> EngineCoreOutput | None:
    try:
        core.add(request.to_request())
    except RequestError as error:
        reason = FinishReason.ERROR.value
        return EngineCoreOutput(request.request_id, [], finish_reason=reason, error=str(error), error_param=error.param)
    return None
