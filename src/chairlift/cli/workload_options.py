"""The options of a workload, which benchmarks, simulations and plans share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chairlift.cli.option_groups import Command, OptionRow, OptionValues, option_group, pop_options, with_options

WORKLOAD = "Workload"

INPUT_LEN = (
    str | None,
    "Prompt tokens: fixed:N, uniform:A..B, exp:MEAN[,A..B] or lognormal:MEDIAN,SIGMA[,A..B]. "
    "Default: lognormal:96,0.7,16..512.",
)
OUTPUT_LEN = (str | None, "Output tokens, in the same notation. Default: exp:96,8..384.")
SEED = (int, "Seed of lengths, tokens and arrivals.", 0)


def add_workload_options(
    max_tokens: str = "max_tokens of every request. Default: its true output length.",
) -> Callable[[Command], Command]:
    """Add the options of a workload to a command.

    The command receives them as one `load`: the arguments of `chairlift.lab.bench.workload_options.WorkloadOptions`.

    Args:
        max_tokens: help text of the option.
    """
    rows: dict[str, OptionRow] = {
        "num_prompts": (int | None, "Number of requests. Default: 64, or all requests of the trace."),
        "workload_seed": SEED,
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "max_tokens": (int | None, max_tokens),
        "request_rate": (
            float | None,
            "Arrivals per second. inf starts all requests at once, as does no rate without a trace.",
        ),
        "burstiness": (float, "Shape of the gaps between arrivals; 1 is Poisson.", 1.0),
        "max_concurrency": (int | None, "Maximum number of concurrent requests (closed loop)."),
        "trace": (Path | None, "Recorded workload, instead of lengths and arrivals."),
    }
    options = option_group(WORKLOAD, **rows)

    def make(given: OptionValues) -> OptionValues:
        load = pop_options(given, options)
        load["seed"] = load.pop("workload_seed")
        return {"load": load}

    return lambda command: with_options(command, options, make, "load")
