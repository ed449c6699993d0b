"""Tests loading and unloading of models on demand, with engines that are only counted, and the threads of a model."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from chairlift import AsyncLLM
from chairlift.config import EngineConfig
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineStatus
from chairlift.engine.startup.required_memory import RequiredMemory
from chairlift.errors import ConfigError, EngineDeadError, EngineUnavailableError, ModelLoadError, OverloadedError
from chairlift.server.access.keys import ANONYMOUS, Key
from chairlift.server.models import model_manager
from chairlift.server.models.engine_loader import EngineLoader
from chairlift.server.models.model_manager import ModelManager, ModelNameError
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import NUM_THREADS, TENANT_THREADS, ModelService, ServedModel
from chairlift.server.preparation.api_options import ApiOptions
from support.waiting import AMPLE_SECONDS, until


class CountedService:
    """A service whose engine only has a number of unfinished requests."""

    def __init__(self, loader: CountingLoader, size: int) -> None:
        self.loader, self.size = loader, size
        self.llm = SimpleNamespace(
            num_unfinished=0, status=self.status, stop=self.stop, engine=SimpleNamespace(facts=None)
        )
        self.state = "running"
        self.memory_bytes = 0
        self.stop_reason: str | None = None

    def status(self) -> EngineStatus:
        return EngineStatus(self.state, 0, 0.0, 0, 0.0, "SIGKILL")  # type: ignore[arg-type]

    def start(self) -> None:
        pass

    def stop(self, reason: str) -> None:
        self.stop_reason = reason

    async def aclose(self, _seconds: float | None = None) -> None:
        await asyncio.sleep(0)
        self.loader.held -= self.size


class CountingLoader(EngineLoader):
    """Loads services of given sizes, and checks that they never exceed the budget."""

    def __init__(self, sizes: dict[str, int], budget: int | None = None) -> None:
        self.sizes, self.budget = sizes, budget
        self.held = self.num_aborts = 0
        self.order: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    def plan(self, spec: ModelSpec, budget: int | None) -> tuple[EngineConfig, RequiredMemory]:
        return spec.config, RequiredMemory(self.sizes[spec.name], 0, 0, 0)

    async def load(self, model: ServedModel, config: EngineConfig) -> ModelService:
        await self.gate.wait()
        if model.name in self.errors:
            raise self.errors[model.name]
        size = self.sizes[model.name]
        self.held += size
        assert self.budget is None or self.held <= self.budget
        self.order.append(model.name)
        service: Any = CountedService(self, size)
        return service  # type: ignore[no-any-return]

    def abort(self) -> None:
        self.num_aborts += 1

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manager, "SWEEP_SECONDS", 0.01)


def make(
    sizes: dict[str, int], budget: int | None = None, keep_alive: float | None = None
) -> tuple[ModelManager, CountingLoader]:
    loader = CountingLoader(sizes, budget)
    models = [
        ServedModel(ModelSpec(name, EngineConfig(), (f"{name}-alias",), keep_alive), EventHub()) for name in sizes
    ]
    manager = ModelManager(models, loader, budget)
    manager.open()
    return manager, loader


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), AMPLE_SECONDS))  # type: ignore[arg-type]


def state_of(manager: ModelManager) -> dict[str, str]:
    return {model.name: model.state for model in manager.models}


async def test_a_model_is_loaded_once_by_the_first_calls_for_it() -> None:
    manager, loader = make({"a": 1, "b": 1})
    leases = await asyncio.gather(*(manager.acquire(manager.find(name, ANONYMOUS)) for name in ("a", "a-alias")))
    assert loader.order == ["a"]
    assert state_of(manager) == {"a": "loaded", "b": "unloaded"}
    assert manager.models[0].num_leases == 2
    for lease in leases:
        lease.close()
        lease.close()
    assert manager.models[0].num_leases == 0
    assert manager.models[0].num_loads == 1
    await manager.aclose()


async def test_the_least_recently_used_idle_model_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "chairlift")

    manager, loader = make({"a": 4, "b": 4, "c": 4}, budget=8)
    for name in ("a", "b", "a", "c"):
        (await manager.acquire(manager.find(name, ANONYMOUS))).close()
    assert state_of(manager) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert (loader.order, manager.memory_bytes) == (["a", "b", "c"], 8)
    assert "model 'b' unloaded" in caplog.text
    assert "(memory was needed for model 'c')" in caplog.text
    await manager.aclose()


async def test_a_model_with_calls_is_not_unloaded_and_leaves_when_they_have_ended() -> None:
    manager, loader = make({"a": 4, "b": 4}, budget=6)
    busy = await manager.acquire(manager.models[0])
    waiting = asyncio.create_task(manager.acquire(manager.models[1]))
    await until(lambda: manager.models[0].is_leaving)
    later = asyncio.create_task(manager.acquire(manager.models[0]))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not later.done()
    assert manager.models[0].state == "loaded"
    busy.close()
    (await waiting).close()
    (await later).close()
    assert loader.order == ["a", "b", "a"]
    await manager.aclose()


async def test_a_busy_model_keeps_its_memory_for_a_multiple_of_its_load_time() -> None:
    manager, _loader = make({"a": 4, "b": 4}, budget=6)
    busy = await manager.acquire(manager.models[0])
    manager.models[0].load_seconds = 1000.0
    waiting = asyncio.create_task(manager.acquire(manager.models[1]))
    await asyncio.sleep(0.05)
    (await manager.acquire(manager.models[0])).close()
    manager.models[0].load_seconds = 0.0
    await until(lambda: manager.models[0].is_leaving)
    busy.close()
    (await waiting).close()
    await manager.aclose()


async def test_a_load_that_no_call_waits_for_any_more_evicts_nothing() -> None:
    manager, loader = make({"a": 4, "b": 4}, budget=6)
    busy = await manager.acquire(manager.models[0])
    waiting = asyncio.create_task(manager.acquire(manager.models[1]))
    await until(lambda: manager.models[0].is_leaving)
    waiting.cancel()
    await until(lambda: manager.models[1].loading is None)
    (await manager.acquire(manager.models[0])).close()
    busy.close()
    assert loader.order == ["a"]
    await manager.aclose()


async def test_a_failed_load_fails_only_its_own_calls_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    manager, loader = make({"a": 1, "b": 1})
    loader.errors["a"] = ModelLoadError("a.gguf: no such file")
    results = await asyncio.gather(
        *(manager.acquire(model) for model in (*manager.models, manager.models[0])), return_exceptions=True
    )
    assert [type(result).__name__ for result in results] == [
        "EngineUnavailableError",
        "ModelLease",
        "EngineUnavailableError",
    ]
    assert "model 'a' cannot be loaded: a.gguf: no such file" in str(results[0])
    failure, error = manager.models[0].failure, results[0]
    assert failure is not None
    assert failure.reason == "a.gguf: no such file"
    assert isinstance(error, EngineUnavailableError)
    hidden = error.text(is_admin=False)
    assert "'a' cannot be loaded: the server's log has the reason" in hidden
    assert "no such file" not in hidden
    assert failure.failure_id in hidden
    assert failure.failure_id in caplog.text
    del loader.errors["a"]
    with pytest.raises(EngineUnavailableError):  # at once, without another attempt
        await manager.acquire(manager.models[0])
    manager.models[0].failed_at -= model_manager.RETRY_SECONDS
    (await manager.acquire(manager.models[0])).close()
    assert manager.models[0].failure is None
    await manager.aclose()


async def test_a_model_larger_than_the_budget_is_an_error_with_the_numbers() -> None:
    manager, _loader = make({"a": 9}, budget=8)
    with pytest.raises(EngineUnavailableError, match=r"needs 9 bytes \(.*\), and models_memory_bytes=8 bytes: raise"):
        await manager.acquire(manager.models[0])
    await manager.aclose()


async def test_a_model_is_unloaded_after_keep_alive_but_not_during_a_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "chairlift")

    manager, _loader = make({"a": 1}, keep_alive=0.03)
    lease = await manager.acquire(manager.models[0])
    await asyncio.sleep(0.1)
    assert manager.models[0].state == "loaded"
    second = lease.renew()
    lease.close()
    await asyncio.sleep(0.1)
    assert manager.models[0].state == "loaded"
    second.close()
    await until(lambda: manager.models[0].state == "unloaded")
    assert "(no call for 0.03 s)" in caplog.text
    (await manager.acquire(manager.models[0])).close()
    await manager.aclose()


async def test_an_engine_that_cannot_be_restarted_is_unloaded_and_loaded_again() -> None:
    manager, loader = make({"a": 1})
    (await manager.acquire(manager.models[0])).close()
    service: Any = manager.models[0].service
    service.state = "cannot_restart"
    await until(lambda: manager.models[0].state == "unloaded")
    (await manager.acquire(manager.models[0])).close()
    assert loader.order == ["a", "a"]
    await manager.aclose()


async def test_waiting_calls_are_limited_and_end_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manager, "MAX_WAITING_CALLS", 2)

    manager, loader = make({"a": 1})
    loader.gate.clear()
    waiting = [asyncio.create_task(manager.acquire(manager.models[0])) for _ in range(2)]
    await until(lambda: manager.num_waiting == 2)
    with pytest.raises(OverloadedError, match="2 calls wait for models to be loaded"):
        await manager.acquire(manager.models[0])
    manager.stop("the server stopped before it had answered this request")
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
    assert loader.num_aborts == 1
    await manager.aclose()


async def test_a_call_that_arrives_while_a_load_is_given_up_starts_another_one() -> None:
    """The load of b ends, because its only call was cancelled, in the turn of the event loop before the new call."""

    manager, loader = make({"a": 2, "b": 2}, budget=2)
    a, b = manager.models
    held = await manager.acquire(a)
    cancelled = asyncio.create_task(manager.acquire(b))
    await until(lambda: a.is_leaving)
    cancelled.cancel()
    for _ in range(2):
        await asyncio.sleep(0)
    assert b.loading is not None
    assert b.loading.done()
    asyncio.get_running_loop().call_soon(held.close)
    (await manager.acquire(b)).close()
    assert loader.order == ["a", "b"]
    await manager.aclose()


async def test_load_and_unload_by_request() -> None:
    manager, _loader = make({"a": 1, "b": 1})
    assert (await manager.load("a", ANONYMOUS)).state == "loaded"
    lease = await manager.acquire(manager.models[0])
    with pytest.raises(HTTPException, match="unfinished calls"):
        await manager.unload("a", ANONYMOUS)
    lease.close()
    assert (await manager.unload("a", ANONYMOUS)).state == "unloaded"
    assert (await manager.unload("b", ANONYMOUS)).state == "unloaded"
    fixed = ModelManager([ServedModel(ModelSpec("c"), EventHub())])
    with pytest.raises(HTTPException, match="always loaded"):
        await fixed.unload("c", ANONYMOUS)
    await manager.aclose()


async def test_keys_may_be_limited_to_models() -> None:
    manager, _loader = make({"a": 1, "b": 1})
    limited = replace(ANONYMOUS, name="bob", models=frozenset({"b"}))
    assert manager.find(None, ANONYMOUS).name == "a"
    assert manager.find(None, limited).name == manager.find("b-alias", limited).name == "b"
    assert [model.name for model in manager.visible(limited)] == ["b"]
    with pytest.raises(ModelNameError, match="API key 'bob' may not use model 'a'; it may use b"):
        manager.find("a", limited)
    with pytest.raises(ModelNameError, match="may use none"):
        manager.find(None, Key("eve", models=frozenset({"z"})))
    with pytest.raises(ModelNameError, match="model 'c' is not served here: use 'a' or 'b'"):
        manager.find("c", ANONYMOUS)
    await manager.aclose()


@settings(max_examples=30, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=40
    ),
    failing=st.sampled_from(["", "b"]),
)
def test_every_call_gets_its_model_or_its_error_within_the_budget(
    calls: list[tuple[str, int, int, bool]], failing: str
) -> None:
    sizes = {"a": 3, "b": 2, "c": 4, "d": 1}

    async def test() -> None:
        manager, loader = make(sizes, budget=6, keep_alive=0.02)
        if failing:
            loader.errors[failing] = ConfigError("broken")
        outcomes: list[str] = []

        async def call(name: str, before: int, during: int, is_cancelled: bool) -> None:
            await asyncio.sleep(before / 500)
            waiting = asyncio.create_task(manager.acquire(manager.find(name, ANONYMOUS)))
            if is_cancelled:
                await asyncio.sleep(during / 500)
                waiting.cancel()
            try:
                lease = await waiting
            except asyncio.CancelledError:
                outcomes.append("cancelled")
                return
            except EngineUnavailableError:
                assert name == failing
                outcomes.append("failed")
                return
            assert name != failing
            assert lease.model.name == name
            assert lease.model.state == "loaded"
            await asyncio.sleep(during / 500)
            assert lease.model.state == "loaded", "a model with calls was unloaded"
            lease.close()
            outcomes.append("answered")

        await asyncio.gather(*(call(*each) for each in calls))
        assert len(outcomes) == len(calls)
        assert manager.num_waiting == sum(model.num_leases for model in manager.models) == 0
        assert manager.memory_bytes == loader.held <= 6
        await manager.aclose()

    run(test)


def test_calls_in_preparation_end_with_the_reason_of_the_stop(tiny_model_dir: Callable[..., Path]) -> None:
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=20, skip_tokenizer_init=True, num_threads=1)
    release = threading.Event()
    started: Counter[str] = Counter()

    def hold(tenant: str) -> None:
        started[tenant] += 1
        release.wait(AMPLE_SECONDS)

    async def run() -> None:
        service = ModelService(llm, ApiOptions())
        service.start()
        tenants = ["busy"] * (TENANT_THREADS + 1) + [str(index) for index in range(NUM_THREADS - TENANT_THREADS)]
        calls = [asyncio.create_task(service.run(tenant, hold, tenant)) for tenant in tenants]
        await until(lambda: started.total() == NUM_THREADS)
        assert started["busy"] == TENANT_THREADS, "the other threads are free for other tenants"
        llm.stop("the server stopped: send it again")
        await service.aclose()
        with pytest.raises(EngineDeadError, match="send it again"):
            await calls.pop(TENANT_THREADS)
        with pytest.raises(EngineDeadError, match="send it again"):
            await service.run("", hold, "")
        release.set()
        await asyncio.gather(*calls)

    try:
        asyncio.run(run())
    finally:
        release.set()
