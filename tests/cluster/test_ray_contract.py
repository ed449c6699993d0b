"""What is used of Ray Serve's alpha interface for routers, and what happens without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from chairlift.cluster.cluster_client import ReplicaCallError, ReplicaLostError
from chairlift.cluster.cluster_view import CallRoute
from chairlift.cluster.replica_state import RoutedPrompt
from chairlift.config import EngineConfig
from chairlift.errors import EngineDeadError

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from chairlift.__main__ import main
sys.argv = ["chairlift", "serve", "--replicas", "2", "--port", "0"]
main()
"""


def test_without_ray_the_error_has_the_install_command() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'chairlift[ray]'" in done.stderr


def test_the_interface_of_routers() -> None:
    pytest.importorskip("ray")
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

    assert [field.name for field in dataclasses.fields(PendingRequest)][:2] == ["args", "kwargs"]
    assert "unique_id" in {field.name for field in dataclasses.fields(ReplicaID)}
    assert "routing_context" in {field.name for field in dataclasses.fields(PendingRequest)}
    assert isinstance(inspect.getattr_static(RunningReplica, "replica_id"), property)
    signatures = {
        "update_replicas": ["self", "replicas"],
        "on_replica_actor_died": ["self", "replica_id"],
        "choose_replicas": ["self", "candidate_replicas", "pending_request"],
    }
    for name, parameters in signatures.items():
        assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == parameters
    assert isinstance(inspect.getattr_static(RequestRouter, "curr_replicas"), property)


def test_what_is_changed_of_ray_to_keep_it_private() -> None:
    pytest.importorskip("ray")
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray._private import ray_constants, services
    from ray.serve._private import replica

    assert replica.add_port_to_grpc_server is add_port_to_grpc_server  # type: ignore[attr-defined]
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica)
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)


def test_the_options_of_calls() -> None:
    pytest.importorskip("ray")
    from ray.serve.handle import DeploymentHandle

    assert {"stream", "_by_reference"} <= inspect.signature(DeploymentHandle.options).parameters.keys()


def test_only_the_loss_of_a_replica_affects_other_calls() -> None:
    """A `ReplicaLostError` ends the messages of the replica, and so all of its requests."""
    pytest.importorskip("ray")
    from ray.exceptions import ActorUnavailableError

    from chairlift.cluster.ray_transport import call_error

    assert isinstance(call_error(ActorUnavailableError("gone", None)), ReplicaLostError)
    for error in (RuntimeError("Unexpected error (StatusCode.OK): ."), EngineDeadError("the engine is dead")):
        assert isinstance(call_error(error), ReplicaCallError)


def test_the_call_of_a_request_is_a_stream_with_one_message() -> None:
    """Without a message, one of 500 short requests ends with the error "Unexpected error (StatusCode.OK)"."""
    pytest.importorskip("ray")
    from chairlift.cluster.ray_deployments import EngineDeployment

    async def run(_prompt: RoutedPrompt, _message: bytes) -> None:
        pass

    deployment: Any = SimpleNamespace(_replica=SimpleNamespace(run=run), _check=lambda route: None)

    async def messages() -> list[bytes]:
        route = CallRoute("request", RoutedPrompt.from_tokens([1, 2, 3], 16))
        return [message async for message in EngineDeployment.run(deployment, route, b"request")]

    assert asyncio.run(messages()) == [b""]


def test_facts_are_those_of_the_given_configuration() -> None:
    """During an update, an ingress must not use those of a replica with the previous configuration."""
    pytest.importorskip("ray")
    from chairlift.cluster.ray_deployments import EngineDeployment

    replica = SimpleNamespace(client=SimpleNamespace(engine=SimpleNamespace(facts="the facts")))
    deployment: Any = SimpleNamespace(_config=EngineConfig(model="a", num_threads=1), _replica=replica)

    def facts_of(config: EngineConfig) -> bytes | None:
        return asyncio.run(EngineDeployment.facts(deployment, config))

    assert msgspec.msgpack.decode(facts_of(EngineConfig(model="a", num_threads=1)) or b"") == "the facts"
    assert facts_of(EngineConfig(model="a", num_threads=2)) is None


def test_each_of_several_models_has_a_deployment_of_its_own() -> None:
    pytest.importorskip("ray")
    from chairlift.cluster.ray_deployments import deployment_name_of

    names = [deployment_name_of(name) for name in ("a-b", "a/b", "a.b", "tiny")]
    assert len(set(names)) == 4
    assert names[0] == "engine-a-b"
    assert all(re.fullmatch("engine-[A-Za-z0-9_-]+", name) for name in names)


def test_a_call_to_a_replica_that_has_gone_does_not_wait_in_the_router() -> None:
    """Ray Serve would route no other call meanwhile."""
    pytest.importorskip("ray")
    from ray.serve._private.common import DeploymentID

    from chairlift.cluster.request_router import PrefixAwareRouter

    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("1", "2")]
    router: Any = object.__new__(PrefixAwareRouter)
    router._deployment_id = DeploymentID(name="engine", app_name="no replica is subscribed")
    prompt = RoutedPrompt.from_tokens([1, 2, 3], 16)
    for route, found in (
        (CallRoute(replica_id="2"), replicas[1:]),
        (CallRoute(replica_id="gone"), replicas),
        (CallRoute("request", prompt), replicas),
    ):
        pending = SimpleNamespace(args=(route,), kwargs={}, routing_context=SimpleNamespace(should_backoff=False))
        assert asyncio.run(router.choose_replicas(replicas, pending)) == [found]
        assert pending.routing_context.should_backoff


def test_ray_copies_the_module_of_the_router_so_that_it_defines_one_class() -> None:
    """A record that is defined there would be another class in the routers than in the callers."""
    pytest.importorskip("ray")
    from chairlift.cluster import request_router

    own = [
        name for name, value in vars(request_router).items()
        if getattr(value, "__module__", None) == request_router.__name__
    ]  # fmt: skip
    assert own == ["PrefixAwareRouter"]


def test_the_log_is_written_although_ray_serve_replaces_the_standard_error() -> None:
    pytest.importorskip("ray")
    code = (
        "import io, logging, sys; from chairlift.cluster.ray_deployments import configure_logging, logger;"
        "from chairlift.server.telemetry.access_log import AccessLog;"
        "sys.stderr = io.StringIO(); AccessLog('text').write('POST /v1');"
        "configure_logging(logging.INFO); logger.info('KV pool')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = done.stderr.splitlines()[-2:]
    assert (first, last.endswith(" INFO KV pool")) == ("POST /v1", True)
