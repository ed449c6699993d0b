"""The session of benchmarks on a GPU, in small on the CPU and with torch's kernels: the cases, and what they find."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import engine_runs, kernel_report
from benchmarks.gpu.ceilings import CallTimer, Ceilings
from benchmarks.gpu.kernel_cases import CaseSizes, KernelCall, KernelCase, ModelKernels, model_cases
from benchmarks.gpu.kernel_report import deviation_from, measure_kernels
from benchmarks.gpu.session import LLAMA_3_8B, TINY, Session
from benchmarks.peers.stage import ROOT

from chairlift.kernels.torch_kernels import TORCH
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.kernel_roofline import KernelRoofline
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.models.registry import read_hf_config
from support.reference_kernels import REFERENCE
from support.tiny_models import make_tiny_config


@pytest.fixture
def session(tmp_path: Path) -> Session:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return Session(str(tmp_path), True, True, ["torch"], 1)


def test_the_command_runs_in_small_and_writes_its_results(tmp_path: Path) -> None:
    file = tmp_path / "session.json"
    arguments = ["--interpret", "--kernels", "torch", "--sections", "kernels,memory", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "the times mean nothing" in ended.stdout
    record = json.loads(file.read_text(encoding="utf-8"))
    names = {each["kernel"] for each in record["sections"]["kernels"]["kernels"]}
    assert {"qkv", "down", "LM head", "attention, decode", "attention, chunk", "sum and norm", "sampler"} <= names
    memory = record["sections"]["memory"]["memory"]
    assert memory["weights"]["planned"] == memory["weights"]["allocated"]
    assert memory["K and V"]["planned"] == memory["K and V"]["allocated"]


def test_a_wrong_kernel_is_found(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongSet:
        def make_kernels(self, quantization: str | None) -> Any:
            return replace(TORCH, make_residual_sum=lambda *_: lambda stream, branch: stream.sub_(branch))

        def make_sampling(self) -> None:
            return None

    monkeypatch.setattr(kernel_report, "find_kernel_set", lambda name: WrongSet())
    result, _ = measure_kernels(session)
    (problem,) = result["problems"]
    assert problem.startswith("sum and norm, 3 rows: torch deviates by ")


def test_more_memory_than_planned_is_found(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_runs, "parameter_bytes", lambda model: 10**9)
    result, _ = engine_runs.compare_memory(session)
    assert [problem.split(" take ")[0] for problem in result["problems"]] == ["weights"]


def test_a_call_gets_its_arguments_again() -> None:
    x, values = torch.ones(3), torch.ones(3)
    call = KernelCall(lambda: x.mul_(2), ((x, values),))
    assert call.result().tolist() == [2, 2, 2]
    CallTimer(torch.device("cpu"), 3).seconds(call.call, call.restore)
    assert call.result().tolist() == [2, 2, 2]


def test_deviations_are_relative_and_those_of_tokens_are_shares() -> None:
    assert deviation_from(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])) == 0.25
    assert deviation_from(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert not deviation_from(torch.ones(2), torch.full((2,), torch.nan)) <= 1


def test_the_limit_is_the_slower_of_both_ceilings() -> None:
    ceilings = Ceilings(bytes_per_s=10.0, flops_per_s=100.0)
    assert ceilings.least_seconds(20.0, 100.0) == (2.0, "memory")
    assert ceilings.least_seconds(20.0, 300.0) == (3.0, "compute")


def test_work_is_that_of_the_cost_model() -> None:
    """The cases of a decode step have the work of one layer in the roofline of kernels."""
    config = read_hf_config(LLAMA_3_8B, source="config.json")
    cases = {(case.name, case.size): case for case in model_cases(config, CaseSizes(), 2)}
    cost_model = KernelRoofline(ModelShape("llama", config), DEVICES["H100-SXM"])
    costs = {cost.name: cost for cost in cost_model.costs(StepShape(64, 64, 64, 64 * 2048, 64 * 2048))}
    for name in ("qkv", "output", "gate_up"):
        case = cases[name, "64 rows"]
        assert (32 * case.num_bytes, 32 * case.num_flops) == (costs[name].num_bytes, costs[name].num_flops)
    down = cases["down", "64 rows"].num_bytes - 64 * 14336 * 2  # The product reads gate and up itself.
    assert 32 * down == costs["down"].num_bytes
    decode = cases["attention, decode", "64 x 1 at 2048"]
    assert 32 * decode.num_flops == costs["attention"].num_flops
    assert 32 * decode.num_bytes == pytest.approx(costs["attention"].num_bytes, rel=0.01)


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_cases_of_other_architectures_have_the_results_of_the_definition(arch: str) -> None:
    model_class, tiny = make_tiny_config(arch)
    fields = tiny.to_dict() | {"architectures": [model_class.__name__], "dtype": "bfloat16"}
    config = read_hf_config(fields, source="config.json")
    cases: list[KernelCase] = list(model_cases(config, CaseSizes((3,), 2, 24, 6), 2))
    arguments = (None, torch.float32, torch.float32, torch.device("cpu"))
    sets = [ModelKernels(config, kernels, *arguments) for kernels in (REFERENCE, TORCH)]
    with torch.inference_mode():
        for case in cases:
            expected, result = (case.make(each).result() for each in sets)
            assert deviation_from(expected, result) < 1e-4, (case.name, case.size)
    names = {case.name for case in cases}
    assert ("mixture of experts" in names) == (arch != "deepseek_v3" or config.layers[-1].mixture is not None)
    assert ("recurrence, decode" in names) == (arch == "qwen3_next")
