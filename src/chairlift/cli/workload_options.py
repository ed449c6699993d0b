"""The options of a workload, which benchmarks and simulations share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

import typer

from chairlift.cli.option_groups import Command, OptionValues, parameter, pop_options, with_options

WORKLOAD = "Workload"


def _option(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=WORKLOAD)


NumPrompts = Annotated[int | None, _option("Number of requests. Default: 64, or all requests of the trace.")]
WorkloadSeed = Annotated[int, _option("Seed of lengths, tokens and arrivals.")]
InputLen = Annotated[
    str | None,
    _option(
        "Prompt tokens: fixed:N, uniform:A..B, exp:MEAN[,A..B] or lognormal:MEDIAN,SIGMA[,A..B]. "
        "Default: lognormal:96,0.7,16..512."
    ),
]
OutputLen = Annotated[str | None, _option("Output tokens, in the same notation. Default: exp:96,8..384.")]
MaxTokens = Annotated[int | None, _option("max_tokens of every request. Default: its true output length.")]
RequestRate = Annotated[
    float | None, _option("Arrivals per second. inf starts all requests at once, as does no rate without a trace.")
]
Burstiness = Annotated[float, _option("Shape of the gaps between arrivals; 1 is Poisson.")]
MaxConcurrency = Annotated[int | None, _option("Maximum number of concurrent requests (closed loop).")]
TracePath = Annotated[Path | None, _option("Recorded workload, instead of lengths and arrivals.")]


class WorkloadArguments(TypedDict):
    """The values of the options: the arguments of `chairlift.lab.bench.workload_options.WorkloadOptions`."""

    num_prompts: NumPrompts
    seed: WorkloadSeed
    input_len: InputLen
    output_len: OutputLen
    max_tokens: MaxTokens
    request_rate: RequestRate
    burstiness: Burstiness
    max_concurrency: MaxConcurrency
    trace: TracePath


DEFAULTS = {"seed": 0, "burstiness": 1.0}
"""The defaults that are not None."""


def add_workload_options(*, seed: str = "workload_seed", **kinds: Any) -> Callable[[Command], Command]:
    """Add the options of a workload to a command, which receives them as one `load`.

    Args:
        seed: name of the seed option; `--seed` is that of the engine in most commands.
        kinds: annotated types of options that differ in the command.
    """
    types = {**get_type_hints(WorkloadArguments, include_extras=True), **kinds}
    names = {field: seed if field == "seed" else field for field in types}
    options = [parameter(names[field], kind, DEFAULTS.get(field)) for field, kind in types.items()]

    def make(given: OptionValues) -> OptionValues:
        typed = pop_options(given, options)
        return {"load": WorkloadArguments(**{field: typed[name] for field, name in names.items()})}  # type: ignore[typeddict-item]

    return lambda command: with_options(command, options, make, "load")
