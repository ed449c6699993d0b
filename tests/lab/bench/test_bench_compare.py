"""`bench compare` on a tiny random model: order, identical requests, ratios, tokens, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine
from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS, RequestArrived, read_events
from chairlift.lab.bench import driver
from chairlift.lab.bench.benchmark_result import BenchmarkResult, MeasuredRange
from chairlift.lab.bench.compare import RATIOS, CompareOptions, TokenCheck, TokenDifference, run_compare
from chairlift.lab.bench.policies import ComparedPolicy, parse_policies, parse_policy
from chairlift.lab.report.recorded_run import recorded_run
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.models.decoder import DecoderModel
from chairlift.models.kv_layout import KVLayout
from support.command_runner import invoke
from support.native import needs_native

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
NAMES = ["static-global", "static", "exact", "paged"]
LOAD: dict[str, Any] = {"num_prompts": 7, "input_len": "uniform:5..20", "output_len": "uniform:2..20"}


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json; its random parameters are the same every time."""
    folder = tmp_path_factory.mktemp("tiny_compare")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return folder


def engine(folder: Path, **changes: Any) -> EngineConfig:
    common = {"load_format": "dummy", "num_threads": 1, "block_size": 4, "num_kv_blocks": 40, "max_model_len": 64}
    return EngineConfig(model=str(folder), skip_tokenizer_init=True, **{**common, **changes})


def options(names: Sequence[str] = NAMES, **changes: Any) -> CompareOptions:
    return CompareOptions(policies=parse_policies(",".join(names)), **{**LOAD, "num_warmups": 1, **changes})


@pytest.fixture(scope="module")
def served() -> list[list[WorkloadRequest]]:
    """The workloads that the policies served for `result`, in their order."""
    return []


Compared = tuple[BenchmarkResult, TokenCheck]


@pytest.fixture(scope="module")
def num_allocations() -> list[int]:
    return []


@pytest.fixture(scope="module")
def result(tiny_config: Path, served: list[list[WorkloadRequest]], num_allocations: list[int]) -> Iterator[Compared]:
    """Two rounds of four policies in a pool that is too small for all requests."""
    drive, allocate = driver.drive, DecoderModel.allocate_kv_cache

    def recording(
        target: Engine, workload: Sequence[WorkloadRequest], limit: int | None = None
    ) -> dict[str, list[int]]:
        served.append(list(workload))
        return drive(target, workload, limit)

    def counting(model: DecoderModel, num_blocks: int, block_size: int, layout: KVLayout) -> None:
        num_allocations.append(num_blocks)
        allocate(model, num_blocks, block_size, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "drive", recording)
        patch.setattr(DecoderModel, "allocate_kv_cache", counting)
        yield run_compare(engine(tiny_config), options(repeats=2, static_batch_size=2, max_tokens=40))


@pytest.mark.parametrize(
    ("text", "batching", "kv", "run_to"),
    [
        ("paged", "continuous", "paged", None),
        ("oracle", "continuous", "oracle", None),
        ("continuous", "continuous", "paged", None),
        ("continuous/max", "continuous", "max", None),
        ("static", "static", "max", "batch"),
        ("static-global", "static", "max", "global"),
        (" static/paged ", "static", "paged", "batch"),
        ("static-global/pow2", "static", "pow2", "global"),
    ],
)
def test_policies_are_parsed(text: str, batching: str, kv: str, run_to: str | None) -> None:
    assert parse_policy(text) == ComparedPolicy(text.strip(), batching, kv, run_to)


@pytest.mark.parametrize(
    ("text", "batching", "kv", "order", "predictor"),
    [
        ("fair", "continuous", "paged", "fair", None),
        ("srpt:oracle", "continuous", "paged", "srpt", "oracle"),
        ("srpt:history:0.9", "continuous", "paged", "srpt", "history:0.9"),
        ("exact/srpt", "continuous", "exact", "srpt", None),
        ("static/paged/srpt:max_tokens", "static", "paged", "srpt", "max_tokens"),
    ],
)
def test_orders_of_the_queue_are_parsed(text: str, batching: str, kv: str, order: str, predictor: str | None) -> None:
    policy = parse_policy(text)
    assert (policy.batching, policy.kv) == (batching, kv)
    config = policy.config(EngineConfig(length_predictor="none"), None, None) if predictor else None
    assert (policy.scheduling_policy, policy.length_predictor) == (order, predictor)
    assert config is None or (config.scheduling_policy, config.length_predictor) == (order, predictor)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("static,orca", r"policy 'orca' is unknown: write paged, exact.*or BATCHING/KV"),
        ("static,static/half", r"policy 'static/half' is unknown"),
        ("paged/static,max", r"policy 'paged/static' is unknown"),
        ("static,/max", r"policy '/max' is unknown"),
        ("", r"must have at least one name"),
        ("static,paged,static/max", r"'static' and 'static/max' are the same policy"),
        ("paged,continuous", r"'paged' and 'continuous' are the same policy"),
        ("srpt,continuous/paged/srpt", r"'srpt' and 'continuous/paged/srpt' are the same policy"),
    ],
)
def test_errors_name_the_policy(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_policies(text)


def test_one_policy_is_not_a_comparison() -> None:
    with pytest.raises(ConfigError, match=r"policies must have at least two names, .*got 'paged'"):
        options(["paged"])


def test_options_apply_to_the_policies_that_have_them() -> None:
    static, exact, paged = (
        policy.config(EngineConfig(), 3, "first-fit") for policy in parse_policies("static-global,exact,paged")
    )
    assert (static.batching, static.static_batch_size, static.static_run_to) == ("static", 3, "global")
    assert (static.kv, static.kv_arena) == ("max", "first-fit")
    assert (exact.batching, exact.static_batch_size, exact.kv_arena) == ("continuous", None, "first-fit")
    assert (paged.kv, paged.kv_arena, paged.static_run_to) == ("paged", "buddy", None)


def test_reservations_of_the_whole_pool_are_reported(tiny_config: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_compare(engine(tiny_config, num_kv_blocks=16), options(["static", "exact", "paged"], repeats=1))
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message.partition(":")[0] for message in warned] == ["static", "exact"]
    assert "max_model_len=64" in warned[0]
    assert "a pool of 64 slots" in warned[0]
    assert "--max-tokens" in warned[0]


def test_the_order_of_policies_rotates(result: Compared) -> None:
    assert result[0].facts["order"] == [NAMES, [*NAMES[1:], NAMES[0]]]
    assert {name: len(runs) for name, runs in result[0].runs.items()} == dict.fromkeys(NAMES, 2)


def test_policies_serve_identical_requests(result: Compared, served: list[list[WorkloadRequest]]) -> None:
    assert len(served) == 3 * 4, "warm-up and two rounds of four policies"
    rounds = [served[start : start + 4] for start in range(4, len(served), 4)]
    for in_round in rounds:
        assert [workload == in_round[0] for workload in in_round] == [True] * 4
    (first, *_), (second, *_) = rounds
    assert [r.output_len for r in first] == [r.output_len for r in second]
    assert [r.prompt_token_ids for r in first] != [r.prompt_token_ids for r in second]
    assert {r.max_tokens for r in first} == {40}
    assert result[0].facts["max_tokens"] == {"min": 40, "max": 40}


def test_the_token_budget_is_equal_and_not_limited_by_time(result: Compared) -> None:
    assert len({engine.max_num_batched_tokens for engine in result[0].engines.values()}) == 1
    assert all(engine.step_time is None for engine in result[0].engines.values())


def test_memory_is_equal_and_allocated_once(result: Compared, num_allocations: list[int]) -> None:
    assert num_allocations == [40]
    assert {(e.num_blocks, e.block_size, e.max_model_len) for e in result[0].engines.values()} == {(40, 4, 64)}
    for runs in result[0].runs.values():
        for run in runs:
            assert sum(run[kind] or 0.0 for kind in SLOT_KINDS) == pytest.approx(1)


def test_every_policy_has_its_characteristic_figures(result: Compared) -> None:
    def metrics(name: str) -> Any:
        return SimpleNamespace(**result[0].runs[name][0])

    assert result[0].engines["static-global"].static_run_to == "global"
    assert {result[0].engines[name].static_batch_size for name in NAMES[:2]} == {2}
    assert metrics("static-global").num_steps > metrics("static").num_steps > metrics("paged").num_steps
    assert metrics("static-global").padding_tokens > metrics("static").padding_tokens > 0
    assert metrics("exact").padding_tokens == metrics("paged").padding_tokens == metrics("exact").preemptions == 0
    assert metrics("paged").mean_batch_size > metrics("exact").mean_batch_size > 1
    assert metrics("static").mean_busy_seats < metrics("static").mean_batch_size
    assert metrics("paged").mean_busy_seats == metrics("paged").mean_batch_size
    assert metrics("exact").waste == pytest.approx(
        metrics("exact").reserved + metrics("exact").internal + metrics("exact").external
    )
    assert len({metrics(name).output_tokens for name in NAMES}) == 1
    internal = {name: result[0].runs[name][0]["internal"] or 0.0 for name in NAMES}
    assert internal["exact"] > internal["paged"]


def test_ratios_are_medians_of_the_ratios_of_rounds(result: Compared) -> None:
    record = result[0].to_dict()["systems"]
    first = [run["output_tokens_per_s"] or 0 for run in result[0].runs[NAMES[0]]]
    for name in NAMES:
        mine = [run["output_tokens_per_s"] or 0 for run in result[0].runs[name]]
        ratios = [value / base for value, base in zip(mine, first, strict=True)]
        assert record[name]["results"]["output_tokens_per_s"]["median"] == pytest.approx(median(mine))
        expected = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
        assert record[name]["ratios"]["output_tokens_per_s"] == pytest.approx(expected)
    assert set(record[NAMES[0]]["ratios"]) == set(RATIOS)


def test_counts_come_before_speeds_and_one_round_has_no_ratio_of_speeds(result: Compared) -> None:
    once = replace(result[0], runs={name: runs[:1] for name, runs in result[0].runs.items()})
    assert not any(system["ratios"] for system in once.to_dict()["systems"].values())
    for benchmark, is_compared in ((result[0], True), (once, False)):
        rows = [str(cell) for cell in benchmark.table().columns[0].cells]
        assert rows.index("preemptions") < rows.index("output tokens/s") < rows.index("TTFT p99, s")
        ratio = f"  ratio to {NAMES[0]}"
        assert [rows.count(row) for row in ("  minimum", "  maximum", ratio)] == [
            is_compared * len(shown(benchmark))
        ] * 3


def shown(benchmark: BenchmarkResult) -> list[str]:
    """The speeds of the table."""
    return [key for key in RATIOS if benchmark.spread(NAMES[0], key) is not None]


def test_ratios_do_not_depend_on_the_speed_of_a_round(result: Compared) -> None:
    """A machine that becomes slower between rounds changes no ratio."""
    key = "output_tokens_per_s"

    def ratio(runs: list[float], base: list[float]) -> MeasuredRange | None:
        values = {"base": [{key: value} for value in base], "own": [{key: value} for value in runs]}
        return replace(result[0], runs=values).ratio("own", key)

    assert ratio([300.0, 30.0, 9.0], [100.0, 10.0, 1.0]) == MeasuredRange(3.0, 3.0, 9.0)
    assert ratio([3.0], [0.0]) is None


def test_same_tokens_under_every_policy_even_when_preempted(tiny_config: Path, result: Compared) -> None:
    assert result[1] == TokenCheck("float32", num_requests=14, num_same=14)
    squeezed, tokens = run_compare(
        engine(tiny_config, num_kv_blocks=16, block_size=4), options(["oracle", "paged", "static/paged"], repeats=1)
    )
    assert (squeezed.runs["paged"][0]["preemptions"] or 0) > 0
    assert (squeezed.runs["paged"][0]["recomputed_tokens"] or 0) > 0
    assert tokens == TokenCheck("float32", num_requests=7, num_same=7)


def test_default_max_tokens_are_the_largest_that_fit(tiny_config: Path, tmp_path: Path) -> None:
    chosen = options(["exact", "paged"], repeats=1, input_len="uniform:5..9", save_events=tmp_path / "new" / "logs")
    result = run_compare(engine(tiny_config), chosen)
    for name in ("exact", "paged"):
        events = list(read_events(tmp_path / "new" / "logs" / f"{name}.jsonl"))
        arrivals = [event for event in events if isinstance(event, RequestArrived)]
        assert len(arrivals) == 7
        assert {event.num_prompt_tokens + event.max_tokens for event in arrivals} == {64}
        declared = [arrival.max_tokens for arrival in arrivals]
        assert result[0].facts["max_tokens"] == {"min": min(declared), "max": max(declared)}


def test_max_model_len_is_the_smallest_of_the_policies(tiny_config: Path) -> None:
    """The largest power of two in 40 blocks is 32, which limits a request under a buddy allocator."""
    result = run_compare(engine(tiny_config, max_model_len=None), options(["paged", "max"], repeats=1, num_prompts=1))
    assert {started.max_model_len for started in result[0].engines.values()} == {128}


def test_the_token_check_finds_the_first_difference() -> None:
    check = TokenCheck("bfloat16")
    check.add_round(1, {"a": {"x": [1, 2]}, "b": {"x": [1, 2]}, "c": {"x": [1, 2]}})
    check.add_round(
        2, {"a": {"x": [1, 2], "y": [3, 4]}, "b": {"x": [1, 2], "y": [3, 4]}, "c": {"x": [1, 2], "y": [3, 5]}}
    )
    check.add_round(3, {"a": {"x": [1]}, "b": {"x": [2]}, "c": {"x": [2]}})
    assert (check.num_requests, check.num_same, check.is_same) == (4, 2, False)
    assert check.first_difference == TokenDifference(round=2, request_id="y", policy="c", position=1)


@pytest.mark.parametrize(
    ("names", "changes", "problem"),
    [
        (["exact", "paged"], {"static_batch_size": 4}, "static_batch_size=4: none of exact, paged is static"),
        (["paged", "static/paged"], {"kv_arena": "first-fit"}, "kv_arena=first-fit: none of .* reserves"),
        (NAMES, {"repeats": 0}, "repeats must be at least 1, got 0"),
        (NAMES, {"num_warmups": -1}, "num_warmups must be at least 0, got -1"),
        (NAMES, {"output_len": "fixed:x"}, "write fixed:LENGTH"),
    ],
)
def test_errors_name_the_option(names: list[str], changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        options(names, **changes)


@pytest.mark.parametrize(
    ("changes", "settings", "problem"),
    [
        ({"max_num_seqs": 2}, {"static_batch_size": 4}, "static_batch_size=4 must be at most max_num_seqs=2"),
        ({"enable_prefix_caching": True}, {}, "enable_prefix_caching needs kv=paged"),
        ({"num_kv_blocks": 12}, {}, "max_model_len=64 exceeds the 32 tokens .*kv=max"),
        ({}, {"input_len": "fixed:60"}, r"\(60 prompt, .* does not fit"),
        ({}, {"max_tokens": 1}, "max_tokens must be at least output_len"),
    ],
)
def test_options_that_cannot_be_compared_are_rejected(
    tiny_config: Path, changes: dict[str, Any], settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_compare(engine(tiny_config, **changes), options(**settings))


def test_a_file_in_place_of_the_folder_is_rejected(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"save_events=.*logs: File exists"):
        run_compare(engine(tiny_config), options(save_events=tmp_path / "logs"))


def test_the_report_has_tables_and_one_json_line(result: Compared, capsys: pytest.CaptureFixture[str]) -> None:
    result[0].print(False, result[1].describe())
    result[0].print(True)
    *lines, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["benchmark"] == "compare"
    assert record["machine"] == asdict(result[0].machine)
    assert record["workload"]["seed"] == 0
    assert record["tokens"] == {
        "same": True,
        "dtype": "float32",
        "num_requests": 14,
        "num_same": 14,
        "first_difference": None,
    }
    assert list(record["systems"]) == NAMES
    assert len(record["systems"]["paged"]["runs"]) == 2
    text = " ".join(" ".join(lines).split())
    for part in (*NAMES, "ratio to static-global", "minimum", "TTFT p99, s", "KV slots reserved, %", "preemptions"):
        assert part in text, part
    for part in ("max_tokens of the requests: 40", "static(2), run to global", "40 blocks of 4 = 160 slots", "torch"):
        assert part in text, part
    assert "same tokens: yes, 14 of 14 requests" in lines


def command(folder: Path, *arguments: str) -> Any:
    model = ["--model", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--num-threads", "1"]
    pool = ["--num-kv-blocks", "40", "--block-size", "4", "--max-model-len", "64"]
    load = ["--num-prompts", "5", "--repeats", "1", "--num-warmups", "0", "--input-len", "fixed:6"]
    return invoke(["bench", "compare", *model, *pool, *load, *arguments])


def test_the_command_prints_one_json_line(tiny_config: Path, tmp_path: Path) -> None:
    given = ["--output-len", "anyscale:32/4", "--save-events", str(tmp_path), "--static-batch-size", "2"]
    result = command(
        tiny_config, "--policies", "static,exact,static/paged", "--kv-arena", "first-fit", *given, "--json"
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["workload"].items() >= {"num_prompts": 5, "output_len": "anyscale:32/4", "repeats": 1}.items()
    assert record["systems"]["exact"]["engine"]["kv_arena"] == "first-fit"
    logs = [tmp_path / f"{name}.jsonl" for name in ("static", "exact", "static-paged")]
    assert sorted(tmp_path.iterdir()) == sorted(logs)
    runs = [recorded_run(read_events(log)) for log in logs]
    assert [len(run.requests) for run in runs] == [5, 5, 5]


def test_different_tokens_fail_the_command(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = driver.drive

    def forging(target: Engine, workload: Sequence[WorkloadRequest], limit: int | None = None) -> dict[str, list[int]]:
        tokens = drive(target, workload, limit)
        if target.facts.scheduler_config.batching == "static" and "r1-3" in tokens:
            tokens["r1-3"][0] += 1
        return tokens

    monkeypatch.setattr(driver, "drive", forging)
    result = command(tiny_config, "--policies", "paged,static", "--output-len", "fixed:3")
    assert result.exit_code == 1
    assert "same tokens: NO, 4 of 5 requests; the first difference: round 1, request r1-3, static, output token 0" in (
        result.stdout
    )


def test_options_that_several_runs_cannot_share(tiny_config: Path) -> None:
    for option in ("--kv", "--batching", "--event-log", "--static-run-to"):
        result = command(tiny_config, option, "x")
        assert result.exit_code == 2
        assert f"Unknown option: {option}." in result.output


@needs_native
def test_the_token_budget_of_native_kernels_is_equal(tiny_config: Path) -> None:
    """Chunks of continuous batching are limited by time unless the budget is given, and those of static batches not."""
    config = replace(engine(tiny_config), kernels="native")
    compared = run_compare(config, options(("static", "paged"), repeats=1, static_batch_size=2, max_tokens=40))
    assert [started.step_time for started in compared[0].engines.values()] == [None, None]
    assert len({started.max_num_batched_tokens for started in compared[0].engines.values()}) == 1
