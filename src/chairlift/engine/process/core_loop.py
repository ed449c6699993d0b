"""The loop of an engine core: take commands, run a step, deliver the outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from chairlift.core.engine_core import EngineCore
from chairlift.engine.grammar_gate import GrammarGate
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.lora_adapters import AdapterLoader
from chairlift.engine.process.commands import (
    Abort,
    AdapterResult,
    Add,
    ChargeTenants,
    Command,
    LoadAdapter,
    ReopenFiles,
    Stop,
    UnloadAdapter,
)
from chairlift.errors import ModelLoadError, RequestError
from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason

logger = logging.getLogger("chairlift")

MAX_NEW_TOKENS: Final = 1 << 16
"""Maximum number of prompt tokens that are queued between two steps. Reading commands takes time in which no request
gets a token, so the remaining commands are read after the next step."""


def change_adapters(loader: AdapterLoader, command: LoadAdapter | UnloadAdapter) -> AdapterResult:
    """Load or unload a LoRA adapter."""
    if isinstance(command, UnloadAdapter):
        loader.unload(command.lora_id)
        return AdapterResult(command.lora_id)
    error = None
    try:
        loader.load(command.module)
    except ModelLoadError as failure:
        error = str(failure)
    except Exception as failure:  # A file of a caller must not end the engine, whatever it contains.
        logger.exception("adapter %r cannot be loaded", command.module.lora_name)
        error = f"adapter {command.module.lora_name!r} cannot be read ({type(failure).__name__}); see the log"
    return AdapterResult(command.module.lora_int_id, error)


@dataclass(frozen=True, slots=True)
class CoreLoop:
    """Takes commands between two steps, and runs steps while there is work.

    Attributes:
        take: removes and returns the next command. If there is none, it returns None, or waits if the argument is true.
        deliver: called with the outputs of each step, even if there are none, and with rejections; must not block.
        gate: holds requests until their grammar is compiled.
        adapters: the loader of LoRA adapters; None if there are none.
        reply: called with the result of each command for an adapter; must not block.
        reopen_files: reopens the files to which the engine appends.
    """

    core: EngineCore
    take: Callable[[bool], Command | None]
    deliver: Callable[[list[EngineCoreOutput]], None]
    gate: GrammarGate = field(default_factory=GrammarGate)
    adapters: AdapterLoader | None = None
    reply: Callable[[AdapterResult], None] = lambda _result: None
    reopen_files: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Run until a Stop arrives."""
        core, gate = self.core, self.gate
        while True:
            num_new_tokens = 0
            while num_new_tokens < MAX_NEW_TOKENS or not core.has_work:
                command = self.take(not core.has_work and not gate.is_holding)
                if command is None:
                    break
                if isinstance(command, Stop):
                    return
                if isinstance(command, Add):
                    num_new_tokens += command.cost
                self._execute(command)
            self._add(gate.release())
            if gate.is_holding and not core.has_work:
                gate.wait()
            else:
                self.deliver(core.step())

    def _execute(self, command: Add | Abort | LoadAdapter | UnloadAdapter | ChargeTenants | ReopenFiles) -> None:
        match command:
            case Add():
                siblings = command.requests()
                if not self.gate.hold(siblings):
                    self._add(siblings)
            case Abort(request_ids, reason):
                self.gate.abort(request_ids)
                for request_id in reversed(request_ids):  # The leader last: another one would take its place.
                    self.core.abort(request_id, reason)
            case ChargeTenants(service):
                self.core.scheduler.queue.record_remote_service(service)
            case ReopenFiles():
                self.reopen_files()
            case _:
                assert self.adapters is not None, "the engine has adapters"
                self.reply(change_adapters(self.adapters, command))

    def _add(self, requests: list[EngineRequest]) -> None:
        """Queue requests, and deliver an output with the error for each request that is rejected."""
        rejections = []
        for request in requests:
            try:
                if request.lora_id and (self.adapters is None or request.lora_id not in self.adapters):
                    # It could not be loaded again after a restart.
                    raise RequestError("the LoRA adapter of the request is no longer loaded: load it again", "model")
                self.gate.check(request)
                self.core.add(request.to_request())
            except RequestError as error:
                rejected = EngineCoreOutput(request.request_id, [], FinishReason.ERROR.value)
                rejections.append(rejected._replace(error=str(error), error_param=error.param))
        if rejections:
            self.deliver(rejections)
