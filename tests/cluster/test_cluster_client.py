"""A client over replicas in this process: routing, loss of replicas, draining, and several ingresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.cluster.cluster_app import observe_replicas
from chairlift.cluster.cluster_client import ClusterClient, ReplicaLostError
from chairlift.cluster.cluster_view import ClusterView
from chairlift.cluster.engine_replica import IngressFeed
from chairlift.cluster.replica_messages import ClockReading, ReplicaEngine, ReplicaHello, ReplicaMessage
from chairlift.cluster.replica_state import ReplicaLoad, RoutedPrompt
from chairlift.engine.process.commands import Abort
from chairlift.engine.process.wire import unpack_events
from chairlift.errors import EngineDeadError, Failure, RequestError
from chairlift.events import RequestRejected
from chairlift.lora import LoRARequest
from chairlift.outputs import EngineCoreOutput, RequestOutput
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ServedModel
from support.in_process_cluster import InProcessTransport, make_cluster
from support.pooling_models import write_pooling_model
from support.step_gate import StepGate
from support.waiting import AMPLE_SECONDS, until

PROMPT = list(range(5, 45))

Make = Callable[..., AsyncLLM]


@pytest.fixture
def make_engine(tiny_model_dir: Callable[..., Path]) -> Make:
    folder = tiny_model_dir("llama")

    def make(**options: Any) -> AsyncLLM:
        options = {"num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64, **options}
        return AsyncLLM(
            model=str(folder), num_threads=1, skip_tokenizer_init=True, enable_kv_cache_events=True, seed=0, **options
        )

    return make


def forced(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **fields)


def hold_steps(*engines: AsyncLLM) -> StepGate:
    return StepGate(*(engine.engine.core for engine in engines))  # type: ignore[attr-defined]


def num_sent(transport: InProcessTransport) -> int:
    """The number of unfinished requests that the replicas have passed to their engines."""
    return sum(len(replica._groups) for replica in transport.replicas.values())


async def ready(llm: AsyncLLM, transport: InProcessTransport) -> None:
    """Wait until all replicas can be chosen."""
    llm.open()
    await until(lambda: transport.view._subscribed.keys() == transport.view._running)


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


def test_answers_are_those_of_one_engine(make_engine: Make) -> None:
    prompts = [[index, *PROMPT[: 8 + index]] for index in range(12)]

    async def answers(llm: AsyncLLM) -> list[list[list[int]]]:
        params = forced(9, n=2, seed=1)
        found = await asyncio.gather(*(llm.start(None, prompt, params).collect() for prompt in prompts))
        await llm.aclose()
        return [tokens_of(output) for output in found]

    async def on_cluster() -> list[list[list[int]]]:
        llm, transport = make_cluster(make_engine(), make_engine())
        await ready(llm, transport)
        found = await answers(llm)
        assert min(transport.num_runs.values()) > 0
        assert transport.is_closed
        return found

    async def alone() -> list[list[list[int]]]:
        return await answers(make_engine())

    assert asyncio.run(on_cluster()) == asyncio.run(alone())


async def test_prompts_with_a_cached_prefix_go_to_its_replica(make_engine: Make) -> None:
    llm, transport = make_cluster(make_engine(), make_engine(), make_engine())
    await ready(llm, transport)
    cached = []
    for turn in range(6):
        output = await llm.start(None, [*PROMPT, *range(50, 50 + turn)], forced(2)).collect()
        cached.append(output.num_cached_tokens)
    assert sorted(transport.num_runs.values()) == [0, 0, 6]
    assert cached == [0, 40, 40, 40, 40, 44]  # blocks of 4 tokens; the last token is always computed
    other = await llm.start(None, PROMPT, forced(2), cache_salt="other tenant").collect()
    assert other.num_cached_tokens == 0
    await llm.aclose()


async def test_a_killed_replica_loses_only_streams_with_output(make_engine: Make) -> None:
    engines = make_engine(max_num_seqs=2), make_engine(max_num_seqs=2)
    gate = hold_steps(*engines)
    llm, transport = make_cluster(*engines)
    await ready(llm, transport)
    generations = [llm.start(None, [index, *PROMPT[:6]], forced(30)) for index in range(12)]
    client: Any = llm._client
    await until(lambda: num_sent(transport) == 12)
    gate.allow(4)
    await until(lambda: sum(group.has_started for group in client._groups) == 4)
    before = {
        index: (transport.view.replica_of(one.core_ids[0]), client._groups.get(one.core_ids[0]).has_started)
        for index, one in enumerate(generations)
    }
    transport.kill("replica-0")
    gate.open()
    results = await asyncio.gather(*(one.collect() for one in generations), return_exceptions=True)
    for index, result in enumerate(results):
        if before[index] == ("replica-0", True):
            assert isinstance(result, EngineDeadError)
            assert "the replica of the request was lost (it was killed): send the request again" in str(result)
        else:
            assert isinstance(result, RequestOutput)
            assert len(result.outputs[0].token_ids) == 30
    assert sum(isinstance(result, Exception) for result in results) == 2
    assert llm.status().state == "running"
    assert llm.num_unfinished == 0
    await llm.aclose()


async def test_a_replica_that_drains_finishes_its_streams_and_is_released(make_engine: Make) -> None:
    engines = make_engine(), make_engine()
    gate = hold_steps(*engines)
    llm, transport = make_cluster(*engines)
    await ready(llm, transport)
    old = [llm.start(None, [index, *PROMPT[:6]], forced(20)) for index in range(6)]
    await until(lambda: min(transport.num_runs.values()) > 0)
    transport.drain("replica-0")
    num_old = transport.num_runs["replica-0"]
    new = [llm.start(None, [60 + index, *PROMPT[:6]], forced(3)) for index in range(6)]
    gate.open()
    for generation in (*old, *new):
        assert len((await generation.collect()).outputs[0].token_ids) in (3, 20)
    assert transport.num_runs["replica-0"] == num_old
    client: Any = llm._client
    await until(lambda: client.replicas.keys() == {"replica-1"})
    assert not transport.replicas["replica-0"]._feeds
    await llm.aclose()


async def test_aborted_requests_leave_the_replica(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=1)
    gate = hold_steps(engine)
    llm, transport = make_cluster(engine)
    await ready(llm, transport)
    running, waiting = (llm.start(None, [index, *PROMPT], forced(100)) for index in range(2))
    await until(lambda: num_sent(transport) == 2)
    gate.allow(2)
    await anext(running)
    core = engine.engine.core  # type: ignore[attr-defined]
    await until(lambda: len(core.scheduler.unfinished) == 2)
    waiting.abort()
    running.abort()
    gate.open()
    await until(lambda: core.scheduler.is_idle)
    assert not transport.replicas["replica-0"]._groups
    assert transport.view._subscribed["replica-0"].num_unfinished == 0
    await llm.aclose()


async def test_requests_that_are_aborted_while_their_replica_drains_leave_it(make_engine: Make) -> None:
    engines = make_engine(), make_engine()
    gate = hold_steps(*engines)
    gate.allow(2)
    llm, transport = make_cluster(*engines)
    await ready(llm, transport)
    generation = llm.start(None, PROMPT, forced(200))
    await anext(generation)
    name = transport.view.replica_of(generation.core_ids[0])
    assert name is not None
    transport.drain(name)
    generation.abort()
    gate.open()
    core = engines[int(name[-1])].engine.core  # type: ignore[attr-defined]
    await until(lambda: core.scheduler.is_idle)
    client: Any = llm._client
    await until(lambda: name not in client.replicas)
    await llm.aclose()


async def test_tenants_are_charged_on_all_replicas(make_engine: Make) -> None:
    """The service that replicas report is what their engines have charged, and they charge that of the others."""

    engines = [make_engine(scheduling_policy="fair") for _ in range(2)]
    policies: list[Any] = [engine.engine.core.scheduler._batch.waiting for engine in engines]  # type: ignore[attr-defined]
    llm, transport = make_cluster(*engines)
    await ready(llm, transport)
    requests = [(tenant, length) for tenant in "ab" for length in (8, 20, 20, 33)]
    calls = [llm.start(None, PROMPT[:length], forced(4, n=2), tenant=tenant) for tenant, length in requests]
    await asyncio.gather(*(call.collect() for call in calls))
    reports = [replica.service.take() for replica in transport.replicas.values()]
    assert all(transport.num_runs.values())
    for policy, report in zip(policies, reports, strict=True):
        # The last token of a request is charged when it is sampled, and a lift can only add to a counter.
        assert all(policy.counter(tenant) >= amount > 0 for tenant, amount in report.items())
    total = {tenant: sum(report.get(tenant, 0.0) for report in reports) for tenant in "ab"}
    assert total["a"] > 2 * (8 * 4)  # the output tokens of 8 answers, and prompt tokens
    before = policies[0].counter("a")
    transport.replicas["replica-0"].charge({"a": 1000.0})
    await until(lambda: policies[0].counter("a") == before + 1000.0)
    await llm.aclose()


async def test_texts_that_are_embedded_are_charged(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "bert", "cls")
    llm, transport = make_cluster(AsyncLLM(model=str(folder), num_threads=1))
    await ready(llm, transport)
    await llm.start(None, PROMPT, SamplingParams(max_tokens=1), tenant="a").collect()
    assert transport.replicas["replica-0"].service.take() == {"a": float(len(PROMPT))}
    await llm.aclose()


async def test_requests_wait_in_the_client_while_no_replica_can_be_chosen(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Serve routes a few calls at the same time. If they waited, subscriptions behind them would wait, too."""

    llm, transport = make_cluster(make_engine())
    calls: list[str] = []
    real = transport.run

    async def record(request_id: str, *arguments: Any) -> None:
        calls.append(request_id)
        await real(request_id, *arguments)

    monkeypatch.setattr(transport, "run", record)
    transport.drain("replica-0")
    llm.open()
    waiting = [llm.start(None, PROMPT, forced(3)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not calls
    transport.view.set_running({"replica-0"})
    outputs = await asyncio.gather(*(call.collect() for call in waiting))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]
    assert len(calls) == 3
    await llm.aclose()


async def test_a_rejected_call_affects_no_other_request(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, transport = make_cluster(make_engine())
    await ready(llm, transport)
    replica = transport.replicas["replica-0"]
    real, num_failures = replica.run, 0

    async def run_or_fail(prompt: RoutedPrompt, message: bytes) -> None:
        nonlocal num_failures
        if num_failures < 1:
            num_failures += 1
            raise EngineDeadError("rejected")
        await real(prompt, message)

    other = llm.start(None, PROMPT, forced(100))
    num_first = len((await anext(other)).outputs[0].token_ids)
    monkeypatch.setattr(replica, "run", run_or_fail)
    again = llm.start(None, PROMPT[:8], forced(3))
    assert len((await again.collect()).outputs[0].token_ids) == 3
    assert num_failures == 1
    assert num_first + len((await other.collect()).outputs[0].token_ids) == 100
    await llm.aclose()


async def test_two_ingresses_share_replicas(make_engine: Make) -> None:
    """The same request ids do not collide, each ingress gets its own outputs, and both see all events."""

    engine = make_engine()
    gate = hold_steps(engine)
    first, transport = make_cluster(engine)
    second = AsyncLLM(client=ClusterClient(transport.another(), engine.engine))
    model = ServedModel(ModelSpec("tiny"), second.events)
    observe_replicas(model, second._client)  # type: ignore[arg-type]
    await ready(first, transport)
    second.open()
    client: Any = second._client
    await until(lambda: bool(client.replicas) and client.state == "running")
    generations = [llm.start(None, PROMPT, forced(20), request_id="same") for llm in (first, second)]
    gate.open()
    await until(lambda: len(list(model.engine(None).observer.tracker.requests())) == 2)
    answers = [tokens_of(await generation.collect()) for generation in generations]
    assert answers[0] == answers[1]
    await until(lambda: not any(model.engine("replica-0").observer.tracker.counts().values()))
    client.stop()
    await first.aclose()


async def test_a_late_ingress_learns_the_state_of_a_replica(make_engine: Make) -> None:
    engine = make_engine()
    first, transport = make_cluster(engine)
    await ready(first, transport)
    await first.start(None, PROMPT, forced(2)).collect()
    another = transport.another()
    late = ClusterClient(another, engine.engine)
    late.open(lambda outputs: None, lambda ids, error: None)
    await until(lambda: bool(late.replicas) and late.state == "running")
    assert len(another.view._subscribed["replica-0"]._cached) == 10
    late.stop()
    await first.aclose()


async def test_the_requests_of_a_silent_ingress_are_aborted(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    gate = hold_steps(engine)
    gate.allow(2)
    llm, transport = make_cluster(engine)
    await ready(llm, transport)
    generation = llm.start(None, PROMPT, forced(200))
    await anext(generation)
    for name in ("SILENCE_SECONDS", "BUSY_SILENCE_SECONDS"):
        monkeypatch.setattr(f"chairlift.cluster.engine_replica.{name}", 0.0)
    gate.open()  # With its next message the replica checks when it got the last heartbeat.
    core = engine.engine.core  # type: ignore[attr-defined]
    await until(lambda: core.scheduler.is_idle)
    with pytest.raises(EngineDeadError):
        await generation.collect()
    await llm.aclose()


async def test_adapters_do_not_change_while_a_cluster_runs(make_engine: Make) -> None:
    llm, transport = make_cluster(make_engine(max_loras=1))
    await ready(llm, transport)
    llm.engine.adapters.add(LoRARequest("tone", 1, "/nowhere"))
    with pytest.raises(RequestError, match="name them with --lora-modules"):
        await llm.load_lora_adapter("style", "/nowhere")
    with pytest.raises(RequestError, match="name them with --lora-modules"):
        await llm.unload_lora_adapter("tone")
    assert "tone" in llm.engine.adapters
    await llm.aclose()


async def test_calls_to_a_dead_replica_fail(make_engine: Make) -> None:
    llm, transport = make_cluster(make_engine())
    await ready(llm, transport)
    transport.kill("replica-0")
    with pytest.raises(ReplicaLostError):
        await transport.record_heartbeat("replica-0", "ingress", 0)
    await until(lambda: llm.status().state == "restarting")
    assert llm.status().last_failure is None  # no request was lost
    await llm.aclose()


def engine_state(state: Any = "running") -> ReplicaEngine:
    return ReplicaEngine(state, 0, None)


def make_view(*replica_ids: str) -> ClusterView:
    """A view on idle replicas with 64 blocks of 4 tokens."""
    view = ClusterView(seed=0)
    view.set_running(replica_ids)
    for replica_id in replica_ids:
        load = ReplicaLoad(free_blocks=64)
        hello = ReplicaHello(ClockReading.now(), "", engine_state(), 4, 64, [], load, [])
        view.subscribe(replica_id, hello)
    return view


def make_message(engine: ReplicaEngine, outputs: Any = (), lost: Any = ()) -> ReplicaMessage:
    return ReplicaMessage(list(outputs), list(lost), [], 0, set(), set(), ReplicaLoad(free_blocks=64), engine)


def test_a_request_that_is_aborted_before_its_route_leaves_no_load() -> None:
    """Ray Serve routes in a thread of its own, and may do so after the request was aborted."""
    view, prompt = make_view("0"), RoutedPrompt.from_tokens(PROMPT, 4)
    view.add("a")
    view.remove("a")
    assert view.route("a", prompt) == "0"
    assert view.replica_of("a") is None
    state = view._subscribed["0"]
    assert (state.num_unfinished, state.queued_tokens, state.num_cached_tokens(prompt)) == (0, 0, 0)


def test_a_replica_whose_engine_restarts_is_chosen_only_if_there_is_no_other() -> None:
    view, prompt = make_view("0", "1"), RoutedPrompt.from_tokens(PROMPT, 4)
    view.update("0", make_message(engine_state("restarting")))
    assert {view.route(str(number), prompt) for number in range(20)} == {"1"}
    view.update("1", make_message(engine_state("cannot_restart")))
    assert {view.route(str(number), prompt) for number in range(20)} == {"0", "1"}
    view.update("0", make_message(engine_state()))
    assert {view.route(str(number), prompt) for number in range(20)} == {"0"}


async def test_requests_go_to_a_replica_that_does_not_answer_only_if_no_other_one_answers(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.cluster.cluster_client.HEARTBEAT_SECONDS", 0.01)

    llm, transport = make_cluster(make_engine(), make_engine())
    await ready(llm, transport)
    record, silent = transport.record_heartbeat, {name: asyncio.Event() for name in transport.replicas}
    failing: set[str] = set()

    async def record_unless_silent(replica_id: str, ingress_id: str, num_handled: int) -> None:
        if replica_id in failing:
            raise ReplicaLostError("no answer")
        while silent[replica_id].is_set():
            await asyncio.sleep(0.001)
        await record(replica_id, ingress_id, num_handled)

    def is_answering(name: str) -> bool:
        return transport.view._subscribed[name].is_answering

    async def runs_on(number: int) -> list[str]:
        before = dict(transport.num_runs)
        calls = [llm.start(None, [number, index], forced(2)) for index in range(8)]
        await asyncio.gather(*(call.collect() for call in calls))
        return sorted(name for name, count in transport.num_runs.items() if count > before[name])

    transport.record_heartbeat = record_unless_silent  # type: ignore[method-assign]
    silent["replica-0"].set()
    await until(lambda: not is_answering("replica-0"))
    assert await runs_on(1) == ["replica-1"]
    failing.add("replica-1")
    await until(lambda: not is_answering("replica-1"))
    assert await runs_on(2) == ["replica-0", "replica-1"], "none answers"
    silent["replica-0"].clear()
    await until(lambda: is_answering("replica-0"))
    assert await runs_on(3) == ["replica-0"]
    failing.clear()
    await until(lambda: is_answering("replica-1"))
    assert await runs_on(4) == ["replica-0", "replica-1"]
    await llm.aclose()


async def test_requests_that_an_engine_loses_run_elsewhere_if_they_have_no_output(make_engine: Make) -> None:
    """The engine of a replica dies and is restarted, while the replica lives."""

    engines = [make_engine(max_num_seqs=1) for _ in range(2)]
    gate = hold_steps(*engines)
    llm, transport = make_cluster(*engines)
    await ready(llm, transport)
    calls = [llm.start(None, [index, *PROMPT[:6]], forced(20)) for index in range(6)]
    client: Any = llm._client
    await until(lambda: num_sent(transport) == 6)
    gate.allow(3)
    await until(lambda: sum(group.has_started for group in client._groups) == 2)
    places = [(transport.view.replica_of(one.core_ids[0]), client._groups.get(one.core_ids[0])) for one in calls]
    begun = [place == "replica-0" and group.has_started for place, group in places]
    ids = [group.request_id for place, group in places if place == "replica-0"]
    engines[0]._client.state = "restarting"
    engines[0]._client.send(Abort(ids))
    transport.replicas["replica-0"]._fail(ids, EngineDeadError("out of memory"))
    gate.open()
    results = await asyncio.gather(*(one.collect() for one in calls), return_exceptions=True)
    assert [isinstance(result, Exception) for result in results] == begun
    assert sum(begun) == 1
    assert "the engine of the request was lost (out of memory): send" in str(results[begun.index(True)])
    assert transport.num_runs["replica-1"] == 5
    assert client.replicas["replica-0"].engine.state == "restarting"
    await llm.aclose()


async def test_a_change_of_the_engine_is_published_without_a_step(make_engine: Make) -> None:
    engine = make_engine()
    llm, transport = make_cluster(engine)
    await ready(llm, transport)
    client: Any = llm._client
    engine._client.state, engine._client.last_failure = "restarting", Failure("out of memory")
    transport.replicas["replica-0"]._fail([], EngineDeadError("out of memory"))
    await until(lambda: client.replicas["replica-0"].engine.state == "restarting")
    assert client.replicas["replica-0"].engine.last_failure == "out of memory"
    late = ClusterClient(transport.another(), engine.engine)
    late.open(lambda outputs: None, lambda ids, error: None)
    await until(lambda: "replica-0" in late.replicas and late.replicas["replica-0"].engine.state == "restarting")
    late.stop()
    await llm.aclose()


async def test_an_output_before_the_loss_in_one_message_ends_the_request(make_engine: Make) -> None:
    """The request would otherwise start anew, and its client would read the first token twice."""

    engine = make_engine(max_num_seqs=1)
    gate = hold_steps(engine)
    gate.allow(1)
    llm, transport = make_cluster(engine)
    await ready(llm, transport)
    running, waiting = (llm.start(None, [index, *PROMPT], forced(40)) for index in range(2))
    await anext(running)
    client: Any = llm._client
    [request_id] = waiting.core_ids
    await until(lambda: transport.view.replica_of(request_id) == "replica-0")
    message = make_message(engine_state(), [EngineCoreOutput(request_id, [7])], [([request_id], "it died")])
    client._dispatch(client.replicas["replica-0"], message)
    with pytest.raises(EngineDeadError, match="it died"):
        await anext(waiting)
    gate.open()
    assert len((await running.collect()).outputs[0].token_ids) == 39
    await llm.aclose()


async def test_messages_about_an_earlier_run_of_a_request_are_ignored(make_engine: Make) -> None:
    engines = [make_engine() for _ in range(2)]
    gate = hold_steps(*engines)
    llm, transport = make_cluster(*engines)
    await ready(llm, transport)
    call = llm.start(None, PROMPT, forced(10))
    client: Any = llm._client
    [request_id] = call.core_ids
    await until(lambda: transport.view.replica_of(request_id) is not None)
    [other] = client.replicas.keys() - {transport.view.replica_of(request_id)}
    message = make_message(engine_state(), [EngineCoreOutput(request_id, [7])], [([request_id], "it died")])
    client._dispatch(client.replicas[other], message)
    gate.open()
    output = await call.collect()
    assert len(output.outputs[0].token_ids) == 10
    assert sum(transport.num_runs.values()) == 1
    await llm.aclose()


async def test_a_call_that_ends_without_the_last_output_is_repeated(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.cluster.cluster_client.DRAIN_SECONDS", 0.02)

    llm, transport = make_cluster(make_engine())
    await ready(llm, transport)
    real, calls = transport.run, []

    async def run_second(request_id: str, *arguments: Any) -> None:
        calls.append(request_id)
        if len(calls) > 1:
            monkeypatch.setattr("chairlift.cluster.cluster_client.DRAIN_SECONDS", AMPLE_SECONDS)
            await real(request_id, *arguments)

    monkeypatch.setattr(transport, "run", run_second)
    output = await llm.start(None, PROMPT, forced(3)).collect()
    assert len(output.outputs[0].token_ids) == 3
    assert len(calls) == 2
    await llm.aclose()


async def test_an_invalid_message_affects_no_other_message(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, transport = make_cluster(make_engine())
    real = transport.subscribe

    async def with_garbage(replica_id: str, ingress_id: str) -> Any:
        is_first = True
        async for message in real(replica_id, ingress_id):
            yield message
            if is_first:
                yield b"no message"
            is_first = False

    monkeypatch.setattr(transport, "subscribe", with_garbage)
    await ready(llm, transport)
    assert len((await llm.start(None, PROMPT, forced(3)).collect()).outputs[0].token_ids) == 3
    assert llm.status().state == "running"
    await llm.aclose()


async def test_events_are_dropped_for_an_ingress_that_handles_no_messages(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.cluster.engine_replica.MAX_UNHANDLED_MESSAGES", 3)
    monkeypatch.setattr("chairlift.cluster.cluster_client.HEARTBEAT_SECONDS", AMPLE_SECONDS)

    engine = make_engine()
    llm, transport = make_cluster(engine)
    await ready(llm, transport)
    client: Any = llm._client
    for _ in range(5):  # Each request needs at least one message.
        await llm.start(None, PROMPT, forced(3)).collect()
    replica = client.replicas["replica-0"]
    assert replica.num_handled > 3
    assert replica.events.num_dropped == 0
    await transport.record_heartbeat("replica-0", client.ingress_id, 0)
    assert len((await llm.start(None, PROMPT, forced(5)).collect()).outputs[0].token_ids) == 5
    assert replica.events.num_dropped > 0
    [feed] = transport.replicas["replica-0"]._feeds.values()
    await transport.record_heartbeat("replica-0", client.ingress_id, replica.num_handled)
    assert not feed.is_slow
    await llm.aclose()


async def test_the_load_of_a_replica_counts_neither_cached_tokens_nor_blocks_of_finished_requests(
    make_engine: Make,
) -> None:
    engine = make_engine(num_kv_blocks=16)
    llm, transport = make_cluster(engine)
    await ready(llm, transport)
    replica = transport.replicas["replica-0"]
    await llm.start(None, PROMPT, forced(2)).collect()
    step = replica.tracker.last_step
    assert step is not None
    assert step.free_blocks < 16  # after the schedule of the last step
    assert replica.load() == ReplicaLoad(0, 0, 16)
    with hold_steps(engine):
        call = llm.start(None, [*PROMPT, 1, 2], forced(2))
        await until(lambda: replica.load().num_unfinished == 1)
        assert replica.load().queued_tokens == 2
    await call.collect()
    await llm.aclose()


async def test_an_ingress_uses_no_replicas_of_another_model(
    make_engine: Make, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an update to another model, tokens of the previous one must not reach the new one."""

    old = make_engine()
    folder = tiny_model_dir("llama", rms_norm_eps=1e-3)
    new = AsyncLLM(
        model=str(folder), num_threads=1, num_kv_blocks=64, block_size=4, skip_tokenizer_init=True,
        enable_kv_cache_events=True,
    )  # fmt: skip
    llm, transport = make_cluster(old, new)
    llm.open()
    client: Any = llm._client
    await until(lambda: client.replicas.keys() == {"replica-0"} and client._other_models == {"replica-1"})
    calls = [llm.start(None, [index, *PROMPT], forced(3)) for index in range(6)]
    for call in calls:
        assert len((await call.collect()).outputs[0].token_ids) == 3
    assert transport.num_runs == {"replica-0": 6, "replica-1": 0}
    transport.drain("replica-0")
    waiting = llm.start(None, PROMPT, forced(3))
    await asyncio.sleep(0.02)
    transport.view.set_running({"replica-0", "replica-1"})
    assert len((await waiting.collect()).outputs[0].token_ids) == 3
    monkeypatch.setattr("chairlift.cluster.cluster_client.REPLACED_SECONDS", 0.05)
    transport.drain("replica-0")
    with pytest.raises(EngineDeadError, match="updated to another model: send the request again"):
        await llm.start(None, PROMPT, forced(3)).collect()
    await llm.aclose()


def test_an_event_is_encoded_once_for_all_ingresses(make_engine: Make) -> None:
    llm, transport = make_cluster(make_engine())
    (replica,) = transport.replicas.values()
    feeds = [IngressFeed("first"), IngressFeed("second")]
    replica._feeds.update({feed.ingress_id: feed for feed in feeds})
    event = RequestRejected(1.0, "r", "the queue is full")
    replica.emit(event)
    (first,), (second,) = (feed.pending.events for feed in feeds)
    assert unpack_events([first]) == [event]
    assert first[1] is second[1]
    llm.close()
