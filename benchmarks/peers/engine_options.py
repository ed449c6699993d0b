"""Chairlift's own engine options, as its commands take them."""

from __future__ import annotations

import shlex

import typer

from chairlift.cli.engine_options import ModelOption, add_engine_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError


def parse_engine_options(flags: list[str]) -> EngineConfig:
    """`["--max-num-seqs", "32"]` as `chairlift bench throughput` would take it.

    Raises:
        ConfigError: an option that does not exist, or a value that does not fit, in the words of the command line.
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
        raise ConfigError(f"chairlift={shlex.join(flags)!r}: give options of the engine alone")
    return taken[0]
