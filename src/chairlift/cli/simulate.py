"""`chairlift simulate`: simulates published results, or a workload on an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from chairlift.cli.console import FLAG, Json, print_notice
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.lab.bench.policies import ComparedPolicy
from chairlift.lab.bench.policy_values import write_values
from chairlift.lab.bench.simulation import SimulationOptions, print_simulations, run_simulations
from chairlift.lab.bench.workload_options import WorkloadOptions, format_arrivals, format_lengths
from chairlift.option_sources import Given, with_options
from chairlift.options import Selection

ENGINE_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "pacing_tokens_per_second",
    "length_predictor",
    "batching",
    "static_run_to",
    "block_size",
    "kv_cache_memory_bytes",
    "num_kv_blocks",
    "disable_hybrid_kv_cache_manager",
    "enable_prefix_caching",
    "preemption_mode",
    "swap_space",
    "event_log",
)
"""The options of the engine that affect a simulation."""

MODES = {
    "list_presets": frozenset({"list_presets"}),
    "preset": frozenset({"preset", "workload_seed", "num_prompts", "trace", "as_json"}),
    "calibrate": frozenset({"calibrate", "num_threads"}),
}
"""The options that can be combined with each of these modes. The default mode takes all other options."""


def _check_options(given: Given, policies: Sequence[ComparedPolicy], config: EngineConfig) -> None:
    """Raise ConfigError if an option has no effect in the mode that the options select, or on the policies."""
    if "policies" in given and (replaced := sorted(given & {"batching", "static_run_to"})):
        raise ConfigError(f"policies cannot be combined with {', '.join(replaced)}, which its names have: leave it out")
    for option in given & {"scheduling_policy", "length_predictor"}:
        if policies and all(getattr(policy, option) is not None for policy in policies):
            names = ", ".join(policy.name for policy in policies)
            value = getattr(config, option)
            raise ConfigError(f"{option}={value} has no effect on {names}, whose names have one: leave it out")
    mode = next((name for name in MODES if name in given), None)
    unused = given - MODES[mode] if mode is not None else given & {"num_threads"}
    if unused:
        flags = {"list_presets": "--list", "as_json": "--json"}
        names = ", ".join(sorted(flags.get(name, f"--{name.replace('_', '-')}") for name in unused))
        reason = "needs --calibrate" if mode is None else f"cannot be combined with {flags.get(mode, f'--{mode}')}"
        raise ConfigError(f"{names} {reason}: leave it out")


@with_options
def simulate(
    *,
    list_presets: Annotated[
        bool, FLAG, Parameter(name="--list", help="List the presets of published results.")
    ] = False,
    preset: Annotated[str | None, Parameter(help="Simulate a published result (see --list).")] = None,
    calibrate: Annotated[
        Path | None, Parameter(help="Measure this CPU and write it to this file, for --device.")
    ] = None,
    num_threads: Annotated[
        int | None, Parameter(help="Number of CPU threads of --calibrate. Default: all cores.")
    ] = None,
    model: Annotated[
        str | None,
        Parameter(help="Shape (opt-13b, llama-3-8b, ...), folder with config.json, or .gguf file. Default: opt-13b."),
    ] = None,
    as_json: Json = False,
    options: SimulationOptions,
    load: WorkloadOptions,
    config: Annotated[EngineConfig, Selection(only=ENGINE_OPTIONS)],
    given: Given,
) -> None:
    """Simulate a preset, measure the device for simulations, or simulate an engine under a workload."""
    _check_options(given, options.policies or (), config)
    if list_presets:
        from chairlift.lab.presets import PRESETS, print_presets

        print_presets(PRESETS.values())
    elif preset is not None:
        chosen = {"workload_seed": load.seed, "num_prompts": load.num_prompts, "trace": load.trace}
        _run_preset(preset, {name: value for name, value in chosen.items() if name in given}, as_json)
    elif calibrate is not None:
        _calibrate(calibrate, num_threads)
    else:
        print_notice(f"Simulating requests that arrive {format_arrivals(load)}: {format_lengths(load)}")
        results = run_simulations(replace(config, model=model), load, options)
        print_simulations(results, as_json=as_json)
        if options.output is not None:
            values = {name or each.policy: each.run.values() for name, each in results.items()}
            write_values(values, options.output)


def _run_preset(name: str, options: dict[str, Any], as_json: bool) -> None:
    from chairlift.lab.presets import find_preset, print_preset, print_title

    preset = find_preset(name)
    if not as_json:
        print_title(preset)
    print_preset(preset, preset.run(**options), as_json=as_json)


def _calibrate(path: Path, num_threads: int | None) -> None:
    from chairlift.lab.bench.calibrate import calibrate
    from chairlift.lab.tables import constants_table, print_parts
    from chairlift.system.output_files import check_writable, write_output

    check_writable("calibrate", path)
    device, measured = calibrate(num_threads)
    print_parts([constants_table([("device", device.name), *measured])])
    write_output("calibrate", path, json.dumps(asdict(device), indent=2) + "\n")
