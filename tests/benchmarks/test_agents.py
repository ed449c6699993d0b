"""`benchmarks.agents` compares the policies of eviction over the same sessions."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import agents
from chairlift.config import EVICTION_POLICIES


def test_policies_are_compared_over_the_same_sessions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = agents.workloads
    monkeypatch.setattr(agents, "workloads", lambda args: dict(list(whole(args).items())[:1]))
    monkeypatch.setattr(sys, "argv", ["agents", "--sessions", "3", "--turns", "4", "--seeds", "0", "--json"])
    assert agents.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    (load,) = json.loads(line)["results"].values()
    assert load.keys() == {*EVICTION_POLICIES, "oracle"}
    for values in load.values():
        assert 0 < values["hit rate"] < 1
        assert 0 < values["TTFT P50, s"] <= values["TTFT P95, s"]
