"""The section `kernels`: deviations of kernels from their definition, their times, and their shares of the ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from benchmarks.gpu.ceilings import CallTimer, Ceilings
from benchmarks.gpu.kernel_cases import SMALL_SIZES, CaseSizes, KernelCase, ModelKernels, model_cases
from benchmarks.gpu.session import Session
from rich.console import RenderableType
from rich.table import Table

from chairlift.kernels.kernel_set import find_kernel_set
from chairlift.loading.resolve import resolve_model
from support.reference_kernels import REFERENCE

DTYPE: Final = torch.bfloat16

TOLERANCE: Final = 0.02
"""Largest deviation relative to the largest value: some roundings to bfloat16. For tokens it is the share of rows with
another token: a draw near the boundary of two tokens may differ."""


def measure_kernels(session: Session) -> tuple[dict[str, Any], list[RenderableType]]:
    """Compare and time each case with each kernel set, one case after the other."""
    config, device = resolve_model(session.model).config(), session.device
    timer = CallTimer(device, session.rounds)
    ceilings = Ceilings.measure(timer, DTYPE)
    defined = ModelKernels(config, REFERENCE, None, torch.float32, DTYPE, device)
    models = {}
    for name in session.kernels:
        kernel_set = find_kernel_set(name)
        kernels, sampling = kernel_set.make_kernels(None), kernel_set.make_sampling()
        models[name] = ModelKernels(config, kernels, sampling, DTYPE, DTYPE, device)
    sizes = SMALL_SIZES if session.is_small else CaseSizes()
    with torch.inference_mode():
        cases = model_cases(config, sizes, DTYPE.itemsize)
        records = [_measure_case(case, defined, models, timer, ceilings) for case in cases]
    problems = [
        f"{each['kernel']}, {each['size']}: {name} deviates by {found['deviation']:.3g}"
        for each in records
        for name, found in each["sets"].items()
        if not found["deviation"] <= TOLERANCE
    ]
    result = {
        "bytes_per_s": ceilings.bytes_per_s,
        "flops_per_s": ceilings.flops_per_s,
        "kernels": records,
        "problems": problems,
    }
    return result, [_table(records, session, ceilings)]


def _measure_case(
    case: KernelCase, defined: ModelKernels, models: dict[str, ModelKernels], timer: CallTimer, ceilings: Ceilings
) -> dict[str, Any]:
    expected = case.make(defined).result().clone()
    least, limit = ceilings.least_seconds(case.num_bytes, case.num_flops)
    sets = {}
    for name, model in models.items():
        call = case.make(model)
        deviation = deviation_from(expected, call.result())
        seconds = timer.seconds(call.call, call.restore)
        sets[name] = {"deviation": deviation, "seconds": seconds, "ceiling_share": least / seconds}
    work = {"num_bytes": case.num_bytes, "num_flops": case.num_flops, "limited_by": limit}
    return {"kernel": case.name, "size": case.size, **work, "sets": sets}


def deviation_from(expected: torch.Tensor, result: torch.Tensor) -> float:
    """The largest deviation relative to the largest expected value; of tokens the share of those that differ."""
    if not expected.is_floating_point():
        return float((expected != result).float().mean())
    return float((expected - result.float()).abs().max() / expected.abs().max())


def _table(records: Sequence[dict[str, Any]], session: Session, ceilings: Ceilings) -> Table:
    names = list(session.kernels)
    columns = (f"{name}: {column}" for name in names for column in ("deviation", "µs", "% of ceiling"))
    table = Table("kernel", "size", "limited by", *columns, title="kernels in bfloat16 and their definition in float32")
    for record in records:
        cells = []
        for name in names:
            found = record["sets"][name]
            share = f"{100 * found['ceiling_share']:.0f}"
            cells += [f"{found['deviation']:.2g}", f"{found['seconds'] * 1e6:,.1f}", share]
        table.add_row(record["kernel"], record["size"], record["limited_by"], *cells)
    table.caption = (
        f"ceilings: a copy {ceilings.bytes_per_s / 1e9:,.0f} GB/s, a product {ceilings.flops_per_s / 1e12:,.3g} TFLOP/s"
    )
    return table
