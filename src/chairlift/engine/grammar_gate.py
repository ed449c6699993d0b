"""GrammarGate: holds requests until their grammar is compiled, so that steps do not wait for it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.errors import RequestError
from chairlift.grammar.compiler import CompiledGrammar, GrammarCompiler

POLL_SECONDS: Final = 0.002
"""Time that an idle engine waits for a grammar before it reads commands again."""


class GrammarGate:
    """Holds requests of an engine core whose front end runs in another process, and has another compiler.

    A request whose grammar cannot be compiled, or has masks that are too slow, is released as well. `check` rejects it.

    Args:
        grammars: the compiler of the model runner; None: no request is held.
    """

    def __init__(self, grammars: GrammarCompiler | None = None) -> None:
        self._grammars = grammars
        self._held: list[tuple[list[EngineRequest], Future[CompiledGrammar]]] = []  # siblings share a grammar

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def hold(self, requests: list[EngineRequest]) -> bool:
        """Hold these siblings if they have a grammar that is not compiled yet; returns whether they are held."""
        constraint = requests[0].sampling_params.structured_outputs
        if constraint is None or self._grammars is None:
            return False
        grammar = self._grammars.submit(constraint, requests[0].tenant)
        if grammar.done():
            return False
        self._held.append((requests, grammar))
        return True

    def release(self) -> list[EngineRequest]:
        """Release the requests whose grammar is compiled or has failed, in order of arrival."""
        if not self._held:
            return []
        held, self._held = self._held, []
        released: list[EngineRequest] = []
        for requests, grammar in held:
            if grammar.done():
                released += requests
            else:
                self._held.append((requests, grammar))
        return released

    def check(self, request: EngineRequest) -> None:
        """Raise the RequestError with which the compilation of the request's grammar has ended, if it has."""
        constraint = request.sampling_params.structured_outputs
        if constraint is None or self._grammars is None:
            return
        grammar = self._grammars.submit(constraint)
        if grammar.done() and isinstance(error := grammar.exception(), RequestError):
            raise RequestError(str(error), error.param)

    def abort(self, request_ids: Collection[str]) -> None:
        """Remove requests without releasing them; ids of requests that are not held are ignored."""
        kept = (([r for r in requests if r.request_id not in request_ids], grammar) for requests, grammar in self._held)
        self._held = [(requests, grammar) for requests, grammar in kept if requests]

    def wait(self) -> None:
        """Wait until a grammar is compiled, for at most POLL_SECONDS."""
        wait([grammar for _requests, grammar in self._held], POLL_SECONDS, FIRST_COMPLETED)
