"""InFlightRequests agrees with a simple model after any sequence of operations."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.commands import Add
from chairlift.engine.process.in_flight import MAX_RUNS, InFlightRequests
from chairlift.engine.sibling_groups import unfinished_ids
from chairlift.sampling_params import SamplingParams


def siblings(name: int, count: int) -> list[EngineRequest]:
    first = EngineRequest(f"{name}", [1], SamplingParams(), 4, frozenset(), seed=0, arrival_time=0.0)
    return [first, *(replace(first, request_id=f"{name}.{i}", leader_id=f"{name}") for i in range(1, count))]


class Requests(RuleBasedStateMachine):
    """Applies random operations to InFlightRequests and to a model: the request ids of each group of siblings."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = InFlightRequests()
        self.groups: dict[int, list[str]] = {}
        self.started: set[int] = set()
        self.runs: dict[int, int] = {}
        self.num_made = 0

    def ids(self) -> list[str]:
        return [request_id for group in self.groups.values() for request_id in group]

    @rule(count=st.integers(1, 3), is_sent=st.booleans())
    def add(self, count: int, is_sent: bool) -> None:
        requests = siblings(self.num_made, count)
        self.in_flight.add_siblings(requests, is_sent=is_sent)
        self.groups[self.num_made] = [request.request_id for request in requests]
        self.runs[self.num_made] = int(is_sent)
        self.num_made += 1

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from([*self.ids(), "unknown"]), unique=True))
        self.in_flight.remove(gone)
        self.groups = {name: [i for i in group if i not in gone] for name, group in self.groups.items()}
        self.groups = {name: group for name, group in self.groups.items() if group}

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        started = data.draw(st.lists(st.sampled_from([*self.ids(), "unknown"]), unique=True))
        self.in_flight.mark_started(started)
        self.started |= {name for name, group in self.groups.items() if set(group) & set(started)}

    @rule(restarts=st.booleans())
    def die(self, restarts: bool) -> None:
        lost = {name for name in self.groups if name in self.started or self.runs[name] == MAX_RUNS}
        assert self.in_flight.remove_lost() == [i for name, group in self.groups.items() if name in lost for i in group]
        self.groups = {name: group for name, group in self.groups.items() if name not in lost}
        if not restarts:
            return
        for name in self.groups:
            self.runs[name] += 1
        commands = self.in_flight.make_resend_commands()
        assert all(isinstance(command, Add) for command in commands)
        assert [[request.request_id for request in command.requests()] for command in commands] == list(
            self.groups.values()
        )

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.in_flight) == len(self.ids())
        waiting = [i for name, group in self.groups.items() if name not in self.started for i in group]
        assert unfinished_ids(group for group in self.in_flight if not group.has_started) == waiting
        assert len(self.in_flight) == len(self.ids())


TestInFlightRequests = Requests.TestCase
