"""The application of Ray Serve on a real Ray: answers, metrics, and the loss of a replica."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from chairlift.cluster.usage_aggregator import SharedUsage
from support.ray_settings import free_port, read_settings, replica_processes
from support.tiny_engine import tiny_options
from support.waiting import AMPLE_SECONDS, wait_for

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


@dataclass
class RayServer:
    """The address of a cluster."""

    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=AMPLE_SECONDS)

    def replicas(self) -> list[str]:
        return httpx.get(f"{self.url}/v1/engine").json()["replicas"]

    def complete(self, index: int, tokens: int = 24) -> str:
        """What becomes of a stream."""
        try:
            stream = self.client().completions.create(
                model="tiny", prompt=[index + 1, 5, 6, 7], max_tokens=tokens, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
        except openai.APIError as error:
            return "error" if "send the request again" in str(error) else str(error)
        assert reasons[-1] == "length"
        return "finished"


@pytest.fixture(scope="module")
def settings() -> Iterator[None]:
    """The settings of deploy/ray/cluster.env, with a home whose name is short enough for the paths of sockets."""
    from ray._private import ray_constants, services
    from ray.serve._private import api, client

    from chairlift.cluster.ray_processes import wait_for_node

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as home:
        patch.setenv("HOME", home)
        for name, value in read_settings().items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # A runtime_env would start workers anew.
        patch.setenv("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")  # No client is left when it ends.
        # Ray has read this setting when it was imported: the driver would choose another address than Ray's processes.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        patch.setattr(services, "get_node", partial(wait_for_node, services.get_node))
        for module in (api, client):  # It would give up after 60 s, which a busy machine needs.
            patch.setattr(module, "HTTP_PROXY_TIMEOUT", 240)
        yield


@pytest.fixture(scope="module")
def server(settings: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    """Two replicas and one ingress behind HAProxy."""
    import ray
    from ray import serve

    import chairlift.cluster

    folder = tmp_path_factory.mktemp("cluster")
    options = tiny_options(folder)
    model = {"tiny": {name: options[name] for name in ("model", "load_format")}}
    config = folder / "chairlift.yaml"
    limits = {"num-threads": 1, "num-kv-blocks": 64, "max-num-seqs": 4, "scheduling-policy": "fair"}
    config.write_text(json.dumps({"models": model, "seed": 0, "allow-unauthenticated": True, **limits}))
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        application = chairlift.cluster.app({"config": str(config), "replicas": "2"})
        serve.run(application, name="chairlift")
        found = RayServer(f"http://127.0.0.1:{port}")
        wait_for(lambda: len(found.replicas()) == 2)
        yield found
    finally:
        serve.shutdown()
        ray.shutdown()


def test_answers_through_the_openai_client(server: RayServer) -> None:
    client = server.client()
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0, n=2
    )
    assert len(chat.choices) == 2
    assert chat.usage is not None
    explained = httpx.get(f"{server.url}/v1/requests/{chat.id}/explain").json()
    assert len(explained["sequences"]) == 2
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=0)


def test_replicas_report_the_service_of_tenants(server: RayServer) -> None:
    import ray

    from chairlift.cluster.ray_deployments import NAMESPACE

    aggregator = ray.get_actor("chairlift/engine", namespace=NAMESPACE)
    reports: list[float] = []

    def read() -> bool:
        answer = ray.get(aggregator.exchange.remote("reader", SharedUsage()))
        reports.append(sum(answer.amounts.values()))
        return sum(reports) >= 4 + 2 * 24

    read()
    assert server.complete(200) == "finished"
    wait_for(read)


def test_equal_prefixes_go_to_one_replica_and_metrics_show_it(server: RayServer) -> None:
    prompt = list(range(1, 100))
    for _ in range(4):
        server.client().completions.create(model="tiny", prompt=prompt, max_tokens=2)
    text = httpx.get(f"{server.url}/metrics").text
    hits = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert len(hits) == 2
    assert all(any(f'replica="{name}"' in line for line in hits) for name in server.replicas())
    assert sorted(float(line.split()[-1]) for line in hits) == [0.0, 3 * 96.0]


def test_a_stream_that_the_client_closes_leaves_no_request(server: RayServer) -> None:
    stream = server.client().completions.create(
        model="tiny", prompt=[9, 8, 7], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: httpx.get(f"{server.url}/v1/requests").json()["data"] == [])


def test_generated_calls_get_the_answers_of_the_schema(server: RayServer) -> None:
    """Calls that schemathesis makes of the OpenAPI, and damaged bodies, through HAProxy."""
    from tools.generated_calls import fuzz_api, fuzz_bodies  # it imports schemathesis, which is slow

    assert fuzz_api(server.url, 8, 1).num_cases > 0
    assert 400 in fuzz_bodies(server.url, 8, 1)


def test_a_killed_replica_loses_no_request_silently_and_is_replaced(server: RayServer) -> None:
    before = server.replicas()
    with ThreadPoolExecutor(32) as pool:
        results = [pool.submit(server.complete, index, 120) for index in range(32)]
        time.sleep(0.2)
        victim = replica_processes("engine")[0]
        victim.send_signal(signal.SIGKILL)
        outcomes = [result.result(timeout=AMPLE_SECONDS) for result in results]
    assert set(outcomes) <= {"finished", "error"}
    # At most four requests of a replica run at the same time, and only those had output.
    assert outcomes.count("error") <= 4
    wait_for(lambda: len(server.replicas()) == 2 and server.replicas() != before)
    assert server.complete(1) == "finished"
