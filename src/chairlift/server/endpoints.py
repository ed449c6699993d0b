"""The endpoints that take a body, over one engine: what answers them, and how their requests are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.api_options import ApiOptions
from chairlift.server.chat import ChatServing
from chairlift.server.completions import CompletionServing
from chairlift.server.messages_api import MessagesServing
from chairlift.server.model_check import check_model
from chairlift.server.preparation.plan import Fields, Planner
from chairlift.server.preparation.planners import make_planners
from chairlift.server.preparation.preparation import Preparation
from chairlift.server.responses_api import ResponsesServing
from chairlift.server.routes.prepared_route import FinishCall, prepared_route


class Endpoints:
    """What the routes call.

    Args:
        model_name: what the model is called in requests and answers.
        max_json_depth: nesting of arrays and objects in a body, at most.
    """

    def __init__(
        self, llm: AsyncLLM, model_name: str, options: ApiOptions, preparation: Preparation, max_json_depth: int
    ) -> None:
        self.llm = llm
        self.model_name = model_name
        self.preparation = preparation
        self.planners = planners = make_planners(llm.engine, options)
        self.completions = CompletionServing(llm, model_name, planners.completions, preparation)
        self.chat = ChatServing(llm, model_name, planners.chat, preparation)
        self.responses = ResponsesServing(llm, model_name, planners.responses, preparation)
        self.messages = MessagesServing(llm, model_name, planners.messages, preparation)
        self._max_json_depth = max_json_depth

    def route_class(
        self, finish: Mapping[str, tuple[str, FinishCall]], base: type[APIRoute] = APIRoute
    ) -> type[APIRoute]:
        """The route class of endpoints with these paths; see `prepared_route`."""
        return prepared_route(self.preparation, finish, self._max_json_depth, base)

    async def run_utility(self, planner: Planner[Fields, bytes], body: Fields, request: Request) -> Response:
        """Answer a call that runs nothing on the engine.

        Raises:
            RequestError, OverloadedError: before anything is sent.
        """
        check_model(getattr(body, "model", None), self.model_name)
        request.state.admission.check_call(request.state.key)
        with request.state.admission.counted(request.state.key):
            content = await self.preparation.run(request.state.key.tenant, planner.plan, body)
        return Response(content, media_type="application/json")

    async def finish_utility(self, body: Any, content: bytes, request: Request) -> Response:
        """Answer such a call after a worker has prepared it."""
        check_model(body.model, self.model_name)
        with request.state.admission.counted(request.state.key):
            return Response(content, media_type="application/json")
