"""GrammarGate: holds requests until their grammar is compiled, so that steps do not wait for it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.grammar.compiler import CompiledGrammar, GrammarCompiler

POLL_SECONDS: Final = 0.002
"""Time that an idle engine waits for a grammar before it reads commands again."""


@dataclass(slots=True)
class _HeldSiblings:
    """Sibling requests, which share one grammar."""

    requests: list[EngineRequest]
    grammar: Future[CompiledGrammar]


class GrammarGate:
    """Holds requests of an engine core whose front end runs in another process, and has another compiler.

    A request whose grammar cannot be compiled is released as well; the model runner ends it with the same error.

    Args:
        grammars: the compiler of the model runner; None: no request is held.
    """

    def __init__(self, grammars: GrammarCompiler | None = None) -> None:
        self._grammars = grammars
        self._held: list[_HeldSiblings] = []

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def hold(self, requests: list[EngineRequest]) -> bool:
        """Hold these siblings if they have a grammar that is not compiled yet; returns whether they are held."""
        constraint = requests[0].sampling_params.structured_outputs
        if constraint is None or self._grammars is None:
            return False
        grammar = self._grammars.submit(constraint)
        if grammar.done():
            return False
        self._held.append(_HeldSiblings(requests, grammar))
        return True

    def release(self) -> list[EngineRequest]:
        """Release the requests whose grammar is compiled or has failed, in order of arrival."""
        if not self._held:
            return []
        done = [held for held in self._held if held.grammar.done()]
        self._held = [held for held in self._held if held not in done]
        return [request for held in done for request in held.requests]

    def abort(self, request_ids: Collection[str]) -> None:
        """Remove requests without releasing them; ids of requests that are not held are ignored."""
        for held in self._held:
            held.requests = [request for request in held.requests if request.request_id not in request_ids]
        self._held = [held for held in self._held if held.requests]

    def wait(self) -> None:
        """Wait until a grammar is compiled, for at most POLL_SECONDS."""
        wait([held.grammar for held in self._held], POLL_SECONDS, FIRST_COMPLETED)
