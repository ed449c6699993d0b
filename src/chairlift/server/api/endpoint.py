"""Endpoint: an endpoint with a request body, and everything that the server derives from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel

from chairlift.server.api.engine_call import EngineCall
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.protocol.base import RequestBody

Body = TypeVar("Body", bound=RequestBody)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """A path that accepts POST requests with a JSON body, and what answers them.

    The routes, their description in OpenAPI, the admission of calls and the `url`s of batch files are derived from it.

    Attributes:
        plan: converts a valid body to a plan, on a thread; raises RequestError. Without `call` the plan is the JSON of
            the response. The operation in OpenAPI has its name and its docstring.
        body, response: the types of the bodies.
        call: the class of calls that answer the plan with the engine.
        aliases: other paths.
    """

    path: str
    plan: Callable[[ModelPlanner, Body], Any]
    body: type[Body]
    response: type[BaseModel]
    call: type[EngineCall[Any, Any]] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def id_prefix(self) -> str:
        """The beginning of the ids of responses; empty if it does not use the engine."""
        return "" if self.call is None else self.call.id_prefix


def endpoint(
    path: str, response: type[BaseModel], call: type[EngineCall[Any, Any]] | None = None, aliases: tuple[str, ...] = ()
) -> Callable[[Callable[[ModelPlanner, Body], Any]], Endpoint[Body]]:
    """Make an endpoint of a function with the parameters `planner` and `body`, which is its `plan`."""
    return lambda plan: Endpoint(path, plan, get_type_hints(plan)["body"], response, call, aliases)
