"""Parses the options of Chairlift's engine."""

from __future__ import annotations

import shlex

import typer

from chairlift.cli.engine_options import ModelOption, add_engine_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError


def parse_engine_options(flags: list[str]) -> EngineConfig:
    """Parse options such as `["--max-num-seqs", "32"]` in the same way as `chairlift bench throughput`.

    Raises:
        ConfigError: an option is unknown or has an invalid value. The message is that of the command line.
    """
    taken: list[EngineConfig] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @add_engine_options
    def take(model: ModelOption = None, *, config: EngineConfig) -> None:
        taken.append(config)

    try:
        app(flags, standalone_mode=False)
    except ConfigError:
        raise
    except Exception as error:
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        raise ConfigError(f"chairlift={shlex.join(flags)!r}: {format_message()}") from None
    if not taken:
        raise ConfigError(f"chairlift={shlex.join(flags)!r}: give only options of the engine")
    return taken[0]
