"""Ray Serve's own routers in front of Chairlift's replicas, to compare with: its default and its prefix-aware one.

The prefix-aware router is that of `ray.serve.llm`, whose public module needs vLLM or SGLang; the module that defines it
needs neither. It compares texts by characters. Here a character is a block of the prompt, so that it sees the tokens of
the chat template, too.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from chairlift.cluster.cluster_view import CallRoute
from chairlift.cluster.request_router import PrefixAwareRouter

FIRST_CHARACTER = 0x10000
NUM_CHARACTERS = 0x100000


class RayRouter(PrefixAwareRouter):
    """Chooses replicas with the router that follows in the order of the base classes, and reports them to the view."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose replicas of a request with Ray's router. Other calls name their replica."""
        if prompt_of(pending_request) is None:
            return await super().choose_replicas(candidate_replicas, pending_request)
        return await super(PrefixAwareRouter, self).choose_replicas(candidate_replicas, pending_request)  # type: ignore[safe-super]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Report the chosen replica to the view."""
        if (prompt := prompt_of(pending_request)) is not None:
            self.view.assign(pending_request.args[0].request_id, prompt, replica_id.unique_id)
            super().on_request_routed(pending_request, replica_id, result)


def prompt_of(pending_request: PendingRequest | None) -> Any:
    """The routed prompt of a request; None for other calls."""
    first = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return first.prompt if isinstance(first, CallRoute) else None


class RayDefaultRouter(RayRouter, PowerOfTwoChoicesRequestRouter):
    """Ray Serve's default: the one with fewer calls of two random replicas."""


class RayPrefixRouter(RayRouter, PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's prefix-aware router."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        keys = prompt_of(pending_request).block_keys
        return "".join(chr(FIRST_CHARACTER + key % NUM_CHARACTERS) for key in keys) or " "
