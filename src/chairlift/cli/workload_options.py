"""The options of a load, which benchmarks and simulations have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

import typer

from chairlift.cli.option_groups import Command, OptionValues, parameter, pop_options, with_options

WORKLOAD = "Workload"
NumPrompts = Annotated[
    int | None, typer.Option(help="Requests: 64 if not given; of a trace the first ones.", rich_help_panel=WORKLOAD)
]
WorkloadSeed = Annotated[int, typer.Option(help="Of lengths, tokens and arrivals.", rich_help_panel=WORKLOAD)]
InputLen = Annotated[
    str | None,
    typer.Option(
        help="Prompt tokens: fixed:N, uniform:A..B, exp:MEAN[,A..B] or lognormal:MEDIAN,SIGMA[,A..B]; "
        "lognormal:96,0.7,16..512 if not given.",
        rich_help_panel=WORKLOAD,
    ),
]
OutputLen = Annotated[
    str | None,
    typer.Option(help="Output tokens, written the same way; exp:96,8..384 if not given.", rich_help_panel=WORKLOAD),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="What every request declares at most; its true length if not given.", rich_help_panel=WORKLOAD),
]
RequestRate = Annotated[
    float | None,
    typer.Option(help="Arrivals a second; inf, or no rate and no trace: all at once.", rich_help_panel=WORKLOAD),
]
Burstiness = Annotated[
    float, typer.Option(help="Shape of the gaps between arrivals; 1 is Poisson.", rich_help_panel=WORKLOAD)
]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Requests that are out at once, at most (closed loop).", rich_help_panel=WORKLOAD)
]
Trace = Annotated[
    Path | None, typer.Option(help="A recorded load, instead of lengths and arrivals.", rich_help_panel=WORKLOAD)
]


class WorkloadArguments(TypedDict):
    """A load as it is typed: the arguments of `chairlift.lab.bench.workload_options.WorkloadOptions`."""

    num_prompts: NumPrompts
    seed: WorkloadSeed
    input_len: InputLen
    output_len: OutputLen
    max_tokens: MaxTokens
    request_rate: RequestRate
    burstiness: Burstiness
    max_concurrency: MaxConcurrency
    trace: Trace


DEFAULTS = {"seed": 0, "burstiness": 1.0}
"""Of what is not None if it is not given."""


def add_workload_options(*, seed: str = "workload_seed", **kinds: Any) -> Callable[[Command], Command]:
    """Give a command the options of a load; it receives them as one `load`.

    Args:
        seed: what the load's seed is called there; engines have a `--seed` of their own.
        kinds: annotated types of options that are something else there.
    """
    types = {**get_type_hints(WorkloadArguments, include_extras=True), **kinds}
    names = {field: seed if field == "seed" else field for field in types}
    options = [parameter(names[field], kind, DEFAULTS.get(field)) for field, kind in types.items()]

    def make(given: OptionValues) -> OptionValues:
        typed = pop_options(given, options)
        return {"load": WorkloadArguments(**{field: typed[name] for field, name in names.items()})}  # type: ignore[typeddict-item]

    return lambda command: with_options(command, options, make, "load")
