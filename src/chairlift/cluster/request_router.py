"""PrefixAwareRouter: the request router of Ray Serve that chooses replicas by `choose_replica`.

Ray Serve copies this module to the processes that route, so that it must contain nothing but the class. The class uses
the public interface `ray.serve.request_router.RequestRouter`, which is alpha: Ray's version is pinned, and
tests/cluster/test_ray_contract.py checks what is used of it.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from chairlift.cluster.cluster_view import CallRoute, ClusterView, cluster_view


class PrefixAwareRouter(RequestRouter):
    """Routes each call by its `CallRoute`; calls without one go to any replica."""

    @property
    def view(self) -> ClusterView:
        """The replicas as this process knows them."""
        return cluster_view(self._deployment_id.app_name, self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Receive the replicas that Ray Serve routes requests to."""
        super().update_replicas(replicas)
        self.view.set_running(replica.replica_id.unique_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Stop choosing a replica whose actor has died."""
        super().on_replica_actor_died(replica_id)
        self.view.set_running(each.unique_id for each in self.curr_replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica of a call, as the only candidate.

        If there is none, all replicas are candidates, and the call is rejected by the one that it reaches: Ray Serve
        routes only a few calls at the same time, so that one which waits here could wait for a call behind it.
        """
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # before the next try, if this one finds no replica
        route = next((each for each in pending_request.args if isinstance(each, CallRoute)), None)
        if route is None:
            return [candidate_replicas]
        replica_id = route.replica_id
        if replica_id is None:
            assert route.prompt is not None
            replica_id = self.view.route(route.request_id, route.prompt)
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == replica_id]
        return [found or candidate_replicas]
