"""Predictors of output lengths, and the bound of their memory."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core import length_predictors
from chairlift.core.length_predictors import HistoryPredictor, LengthPredictor, make_length_predictor
from chairlift.errors import ConfigError, RequestError
from chairlift.request import FinishReason, Request
from support.fakes import make_engine, make_request


def finish(
    predictor: LengthPredictor,
    length: int,
    prompt: list[int],
    tenant: str = "",
    reason: FinishReason = FinishReason.STOP,
) -> None:
    request = make_request("done", prompt, 1000, tenant=tenant)
    request.token_ids += [7] * length
    request.finish_reason = reason
    predictor.record(request)


def arriving(prompt: list[int], tenant: str = "", max_tokens: int = 1000, output_len: int | None = None) -> Request:
    return make_request("new", prompt, max_tokens, tenant=tenant, output_len=output_len)


def test_none_max_tokens_and_oracle() -> None:
    request = arriving([1, 2], max_tokens=50, output_len=9)
    predictions = [make_length_predictor(name).predict(request) for name in ("none", "max_tokens", "oracle")]
    assert predictions == [None, 50, 9]


def test_the_oracle_rejects_a_request_whose_length_is_not_known() -> None:
    core, _, _, _ = make_engine(length_predictor="oracle")
    with pytest.raises(RequestError, match="length_predictor=oracle needs the output length"):
        core.add(make_request("a", [1, 2]))
    assert not core.scheduler.unfinished


def test_history_is_the_quantile_of_the_same_tenant_and_prefix() -> None:
    predictor = make_length_predictor("history:0.9")
    for length in range(1, 11):
        finish(predictor, length, [1, 2, 3], "a")
        finish(predictor, 10 * length, [9, 2, 3], "a")
        finish(predictor, 500, [1, 2, 3], "b")
    assert predictor.predict(arriving([1, 2, 3], "a")) == 9
    assert predictor.predict(arriving([9, 2, 3], "a")) == 90
    assert predictor.predict(arriving([4], "a")) == 80, "all outputs of the tenant"
    assert predictor.predict(arriving([4], "c")) == 500, "all outputs"
    assert predictor.predict(arriving([4], "c", max_tokens=30)) == 30


def test_history_without_a_quantile_is_the_median() -> None:
    predictor = make_length_predictor("history")
    for length in (1, 2, 3, 40, 50):
        finish(predictor, length, [1])
    assert predictor.predict(arriving([1])) == 3


def test_few_or_aborted_outputs_are_no_history() -> None:
    predictor = make_length_predictor("history")
    for _ in range(4):
        finish(predictor, 3, [1])
    for _ in range(9):
        finish(predictor, 3, [1], reason=FinishReason.ABORT)
    assert predictor.predict(arriving([1], max_tokens=77)) == 77


def test_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_predictors, "MAX_HISTORIES", 10)
    predictor = HistoryPredictor(0.5)
    for index in range(300):
        finish(predictor, 1 + index, [index])
    assert len(predictor._histories) == 10
    assert max(map(len, predictor._histories.values())) == length_predictors.MAX_LENGTHS
    assert predictor.predict(arriving([1])) == 268, "the median of the latest 64 of the tenant"


@pytest.mark.parametrize("name", ["median", "history:0", "history:1", "history:x", "oracle:0.5", "history:"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="length_predictor must be one of none, max_tokens, history, oracle, or history:Q"
    ):
        EngineConfig(length_predictor=name)


def test_srpt_needs_a_predictor_and_has_one_by_default() -> None:
    assert EngineConfig(scheduling_policy="srpt").scheduler_config(64).length_predictor == "history"
    assert EngineConfig().scheduler_config(64).length_predictor == "none"
    with pytest.raises(ConfigError, match="scheduling_policy=srpt orders requests by predicted output lengths"):
        SchedulerConfig(64, scheduling_policy="srpt")
