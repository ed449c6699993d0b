"""`chairlift simulate`: simulates published results, or a workload on an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.engine_options import add_options
from chairlift.cli.option_groups import JSON, OptionValues, add_group, is_given
from chairlift.cli.workload_options import add_workload_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

SIMULATION_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "batching",
    "static_batch_size",
    "static_run_to",
    "block_size",
    "kv_cache_memory_bytes",
    "num_kv_blocks",
    "kv",
    "kv_arena",
    "disable_hybrid_kv_cache_manager",
    "enable_prefix_caching",
    "event_log",
)
"""The options of the engine that affect a simulation."""

MODES = {
    "list_presets": frozenset({"list_presets"}),
    "preset": frozenset({"preset", "workload_seed", "num_prompts", "json"}),
    "calibrate": frozenset({"calibrate", "num_threads"}),
}
"""The options that can be combined with each of these modes. The default mode takes all other options."""


def _check_options(ctx: typer.Context) -> None:
    """Raise ConfigError if an option has no effect in the mode that the options select."""
    given = {name for name in ctx.params if is_given(ctx, name)}
    mode = next((name for name in MODES if name in given), None)
    unused = given - MODES[mode] if mode is not None else given & {"num_threads"}
    if unused:
        flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
        names = ", ".join(sorted(flags[name] for name in unused))
        reason = "needs --calibrate" if mode is None else f"cannot be combined with {flags[mode]}"
        raise ConfigError(f"{names} {reason}: leave it out")


@add_options(SIMULATION_OPTIONS)
@add_workload_options()
@add_group(
    tensor_parallel_size=(int, "Number of devices that share the model.", 1),
    fitted_to=(Path | None, "Event log of a run: step times are a fit to its steps instead of a roofline."),
    json=JSON,
)
def simulate(
    ctx: typer.Context,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets of published results.")] = False,
    preset: Annotated[str | None, typer.Option(help="Simulate a published result (see --list).")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure this CPU and write it to this file, for --device.")
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads of --calibrate. Default: all cores.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Shape (opt-13b, llama-3-8b, ...), folder with config.json, or .gguf file. Default: opt-13b."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A100-40GB, A100-80GB, H100-SXM, H200, or a file of --calibrate. Default: A100-40GB."),
    ] = None,
    *,
    options: OptionValues,
    load: OptionValues,
    config: EngineConfig,
) -> None:
    """Run the scheduler of the engine in virtual time. Prints constants and tables."""
    _check_options(ctx)
    as_json = options.pop("json")
    if list_presets:
        _list_presets()
    elif preset is not None:
        seed = load["seed"] if is_given(ctx, "workload_seed") else None
        _run_preset(preset, seed, load["num_prompts"], as_json)
    elif calibrate is not None:
        _calibrate(calibrate, num_threads)
    else:
        from chairlift.lab.bench.simulation import DEFAULT_DEVICE, SimulationOptions, print_simulation, run_simulation
        from chairlift.lab.bench.workload_options import WorkloadOptions

        source = SimulationOptions(device or DEFAULT_DEVICE, **options)
        print_simulation(run_simulation(config, WorkloadOptions(**load), source), as_json=as_json)


def _list_presets() -> None:
    from chairlift.lab.presets import PRESETS, print_presets

    print_presets(PRESETS.values())


def _run_preset(name: str, workload_seed: int | None, num_prompts: int | None, as_json: bool) -> None:
    from chairlift.lab.presets import PresetOptions, find_preset, print_preset

    preset = find_preset(name)
    print_preset(preset, preset.run(PresetOptions(workload_seed, num_prompts)), as_json=as_json)


def _calibrate(path: Path, num_threads: int | None) -> None:
    from chairlift.lab.bench.calibrate import calibrate
    from chairlift.lab.tables import constants_table, print_parts

    calibration = calibrate(num_threads)
    print_parts([constants_table([("device", calibration.device.name), *calibration.measured])])
    try:
        calibration.save(path)
    except OSError as error:
        raise ConfigError(f"calibrate={path}: {error.strerror}") from None
