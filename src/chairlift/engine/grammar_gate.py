"""Keeps requests back until their grammar is compiled, so that steps never wait for it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.grammar.compiler import CompiledGrammar, GrammarCompiler

LOOK_SECONDS: Final = 0.002
"""How long an idle engine waits for a grammar before it looks at its commands again."""


@dataclass(slots=True)
class _Held:
    """Siblings, which have one grammar."""

    requests: list[EngineRequest]
    grammar: Future[CompiledGrammar]


class GrammarGate:
    """Stands before an engine core whose front end has another process, and so a compiler of its own.

    What cannot be compiled is let through too: the model runner finds the same error, and ends the request with it.

    Args:
        grammars: the model runner's; with None nothing is kept back.
    """

    def __init__(self, grammars: GrammarCompiler | None = None) -> None:
        self._grammars = grammars
        self._held: list[_Held] = []

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def holds(self, requests: list[EngineRequest]) -> bool:
        """Keep these siblings back if they have a grammar that is not known yet."""
        constraint = requests[0].sampling_params.structured_outputs
        if constraint is None or self._grammars is None:
            return False
        grammar = self._grammars.submit(constraint)
        if grammar.done():
            return False
        self._held.append(_Held(requests, grammar))
        return True

    def released(self) -> list[EngineRequest]:
        """Those whose grammar is compiled by now, in order of arrival."""
        if not self._held:
            return []
        done = [held for held in self._held if held.grammar.done()]
        self._held = [held for held in self._held if held not in done]
        return [request for held in done for request in held.requests]

    def drop(self, request_ids: Collection[str]) -> None:
        """Nobody wants these any more."""
        for held in self._held:
            held.requests = [request for request in held.requests if request.request_id not in request_ids]
        self._held = [held for held in self._held if held.requests]

    def wait(self) -> None:
        """For a moment, or until a grammar is compiled."""
        wait([held.grammar for held in self._held], LOOK_SECONDS, FIRST_COMPLETED)
