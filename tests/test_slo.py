"""Service level objectives: which values they take, and which latencies are within them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from chairlift.errors import ConfigError, RequestError
from chairlift.slo import SLO, parse_slo


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 86_400_001, True, "5"])
def test_an_objective_out_of_range_names_field_value_and_limit(value: Any) -> None:
    with pytest.raises(RequestError, match=f"slo.tpot_ms must be .* at most 86400000, got {value!r}") as caught:
        SLO(tpot_ms=value)
    assert caught.value.param == "slo.tpot_ms"


def test_an_slo_has_an_objective() -> None:
    with pytest.raises(RequestError, match="slo must have ttft_ms, tpot_ms or both"):
        SLO()


@pytest.mark.parametrize("given", [5, {"ttft": 5}, [("ttft_ms", 5)]])
def test_an_slo_is_an_object_with_known_fields(given: Any) -> None:
    with pytest.raises(RequestError, match="slo must be an object with ttft_ms, tpot_ms or both"):
        SLO.from_mapping(given)


def test_latencies_are_met_up_to_the_objective() -> None:
    slo = SLO(500, 50)
    assert slo.is_met(0.5, 0.05)
    assert not slo.is_met(0.501, 0.05)
    assert not slo.is_met(0.5, 0.051)
    assert slo.is_met(0.5, None), "a single token has no TPOT"
    assert not slo.is_met(None, None), "without a first token the objectives are missed"
    assert SLO(tpot_ms=50).is_met(1e6, 0.05)


@pytest.mark.parametrize("given", ["ttft:100 tpot:50", ["ttft:100", "tpot:50"], ["tpot:50 ttft:100"]])
def test_the_notation_of_the_command_line(given: Any) -> None:
    assert parse_slo(given, "goodput") == SLO(100, 50)


@pytest.mark.parametrize("given", ["", "ttft", "ttft:x", "e2el:5", "ttft:1 ttft:2", "tpot:0"])
def test_other_notations_are_errors(given: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_slo(given, "goodput")
