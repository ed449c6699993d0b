"""Options of `chairlift serve` on what it tells of its calls: one for each field of ObserveOptions."""

from __future__ import annotations

from chairlift.commands.option_groups import Command, Given, options_of, take, with_options
from chairlift.server.observe_options import HELP, ObserveOptions

OBSERVE = options_of(ObserveOptions, HELP, "Observing")


def takes_observe_options(command: Command) -> Command:
    """Give a command these options; it receives them as `observe`."""

    def make(given: Given) -> Given:
        return {"observe": ObserveOptions(**take(given, OBSERVE))}

    return with_options(command, OBSERVE, make, "observe")
