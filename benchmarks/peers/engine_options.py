"""Parses the options of Chairlift's engine."""

from __future__ import annotations

import shlex

from cyclopts import App, CycloptsError

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.option_sources import with_options


def parse_engine_options(flags: list[str]) -> EngineConfig:
    """Parse options such as `["--max-num-seqs", "32"]` in the same way as `chairlift bench throughput`.

    Raises:
        ConfigError: an option is unknown or has an invalid value. The message is that of the command line.
    """
    taken: list[EngineConfig] = []

    def take(*, config: EngineConfig) -> None:
        taken.append(config)

    app = App(result_action="return_value", help_flags=(), version_flags=())
    app.default(with_options(take))
    try:
        app(flags, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(f"chairlift={shlex.join(flags)!r}: {error}") from None
    return taken[0]
