"""`chairlift simulate`: published results again, or a load on an engine that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.load_options import Load, add_load_options
from chairlift.cli.options import add_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

SIMULATION_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "tenant_weights",
    "batching",
    "static_batch_size",
    "static_run_to",
    "block_size",
    "kv_cache_memory",
    "num_kv_blocks",
    "kv",
    "kv_arena",
    "enable_prefix_caching",
    "event_log",
)
"""The options of an engine that its simulation has too."""

MODES = {
    "list_presets": frozenset({"list_presets"}),
    "preset": frozenset({"preset", "workload_seed", "num_prompts"}),
    "calibrate": frozenset({"calibrate", "num_threads"}),
}
"""An option that chooses what is done -> the options that go with it. Without one of them, all others go."""


def _is_given(ctx: typer.Context, name: str) -> bool:
    """The option was written, rather than left at its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _check_options(ctx: typer.Context) -> None:
    """No option is taken and ignored; raises ConfigError."""
    given = {name for name in ctx.params if _is_given(ctx, name)}
    mode = next((name for name in MODES if name in given), None)
    foreign = given - MODES[mode] if mode is not None else given & {"num_threads"}
    if foreign:
        flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
        names = ", ".join(sorted(flags[name] for name in foreign))
        goes = "goes with --calibrate" if mode is None else f"cannot be combined with {flags[mode]}"
        raise ConfigError(f"{names} {goes}: leave it out")


@add_options(SIMULATION_OPTIONS)
@add_load_options()
def simulate(
    ctx: typer.Context,
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    preset: Annotated[str | None, typer.Option(help="Simulate a published result; see --list.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure this CPU, and write it to this file for --device.")
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads of --calibrate; all if not given.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A shape (opt-13b, llama-3-8b, ...), a folder with config.json, or a .gguf; opt-13b."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A100-40GB, A100-80GB, H100-SXM, H200, or a file of --calibrate; A100-40GB.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share the model.")] = 1,
    fitted_to: Annotated[
        Path | None, typer.Option(help="An event log: steps take what its steps took, instead of a roofline.")
    ] = None,
    tenants: Annotated[
        str | None,
        typer.Option(help="Whose requests these are, by shares, as heavy=20,light=1; see --scheduling-policy fair."),
    ] = None,
    *,
    load: Load,
    config: EngineConfig,
) -> None:
    """Run the engine's own scheduler in virtual time: constants, a table, then one JSON line."""
    _check_options(ctx)
    if list_presets:
        _list_presets()
    elif preset is not None:
        _run_preset(preset, load["seed"] if _is_given(ctx, "workload_seed") else None, load["num_prompts"])
    elif calibrate is not None:
        _calibrate(calibrate, num_threads)
    else:
        from chairlift.lab.bench.load import LoadOptions
        from chairlift.lab.bench.simulation import DEFAULT_DEVICE, SimulationOptions, print_simulation, run_simulation

        options = SimulationOptions(device or DEFAULT_DEVICE, tensor_parallel_size, fitted_to, tenants)
        print_simulation(run_simulation(config, LoadOptions(**load), options))


def _list_presets() -> None:
    from chairlift.lab.presets import PRESET_NAMES, load_preset
    from chairlift.lab.presets.printing import print_presets

    print_presets([load_preset(name) for name in PRESET_NAMES])


def _run_preset(name: str, workload_seed: int | None, num_prompts: int | None) -> None:
    from chairlift.lab.presets import PresetOptions, load_preset, run_preset
    from chairlift.lab.presets.printing import print_preset

    preset = load_preset(name)
    print_preset(preset, run_preset(preset, PresetOptions(workload_seed, num_prompts)))


def _calibrate(path: Path, num_threads: int | None) -> None:
    from chairlift.lab.bench.calibrate import calibrate
    from chairlift.lab.presets.printing import print_constants

    calibration = calibrate(num_threads)
    print_constants([("device", calibration.device.name), *calibration.measured])
    try:
        calibration.save(path)
    except OSError as error:
        raise ConfigError(f"calibrate={path}: {error.strerror}") from None
