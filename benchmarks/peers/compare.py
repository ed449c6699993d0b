"""What all the commands share: their options, the rounds, and the report."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.engine_options import parse_engine_options
from benchmarks.peers.environment import default_folder
from benchmarks.peers.figures import figures_of
from benchmarks.peers.records import WORKLOADS, Run
from benchmarks.peers.report import Measured, Perplexity, print_perplexities, print_report
from benchmarks.peers.stage import Setting, Stage
from benchmarks.peers.workload import Load
from rich.console import Console

from chairlift.errors import ChairliftError, ConfigError
from chairlift.lab.bench.machine import machine_facts
from chairlift.loading.resolve import load_config, resolve_model


@dataclass(frozen=True, slots=True)
class Peer:
    """One command.

    Attributes:
        name: of the engine, in tables and in the JSON line.
        add_arguments: the options that only this peer has.
        settings: installs what is missing, and gives the settings to measure.
        perplexity: of a setting on a text file; None: this peer has no such measure.
    """

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    settings: Callable[[Context], list[Setting]]
    perplexity: Callable[[Context, Setting, Path], Perplexity] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What a peer needs to know.

    Attributes:
        arguments: of the command line, the peer's own included.
        gguf: the model's file, which Chairlift reads too.
        load: what will be sent.
    """

    arguments: argparse.Namespace
    gguf: Path
    load: Load

    @property
    def folder(self) -> Path:
        """Of environments, builds and converted models."""
        folder: Path = self.arguments.folder
        return folder

    @property
    def num_threads(self) -> int | None:
        threads: int | None = self.arguments.num_threads
        return threads

    @property
    def num_threads_or_all(self) -> int:
        return self.num_threads or len(os.sched_getaffinity(0))

    def seats(self, default: Sequence[int]) -> list[int]:
        """`--peer-seats`, else `--seats`, else what is best for the peer."""
        seats = self.arguments.peer_seats or self.arguments.seats
        return list(default) if seats is None else [seats]


def main(peer: Peer, description: str | None) -> None:
    """Run the command of a peer: install the engine, measure both engines alternately, and print the comparison."""
    arguments = _parse(peer, description)
    try:
        _compare(peer, arguments)
    except ChairliftError as error:
        raise SystemExit(f"error: {error}") from None


def _compare(peer: Peer, arguments: argparse.Namespace) -> None:
    load = _load(arguments)
    files = resolve_model(arguments.model)
    if files.kind != "gguf":
        raise ConfigError(f"model={arguments.model}: peers are given the same .gguf file as Chairlift; name one")
    ours = chairlift_setting(arguments, files.path)
    context = Context(arguments, files.path, load)
    settings = peer.settings(context)
    if arguments.install_only:
        return
    if arguments.perplexity_text is not None:
        perplexities = _perplexities(peer, context, settings)
        print_perplexities(peer.name, arguments.perplexity_text, perplexities, Console())
        return
    vocab_size = load_config(files).vocab_size
    stage = Stage(shlex.split(arguments.prefix), arguments.state)
    measured = [Measured(setting) for setting in settings]
    for number in range(arguments.rounds):
        for entry in measured:
            pair = _round(stage, ours, entry.setting, load, vocab_size, number)
            entry.rounds.append((figures_of(pair[0]), figures_of(pair[1])))
            entry.engines = (pair[0].engine, pair[1].engine)
    print_report(peer.name, machine_facts(), load, ours, measured, Console())


def chairlift_setting(arguments: argparse.Namespace, gguf: Path) -> Setting:
    """Chairlift with `--chairlift`, and with what this command gives both engines.

    Raises:
        ConfigError: an unknown option, a value that does not fit, or an option that is given twice.
    """
    given = shlex.split(arguments.chairlift)
    flags = list(given)
    own = {"--model": gguf, "--max-num-seqs": arguments.seats, "--num-threads": arguments.num_threads}
    for name, value in own.items():
        if value is None:
            continue
        if any(flag.split("=")[0] == name for flag in given):
            raise ConfigError(f"chairlift={arguments.chairlift!r}: {name} is given for both engines, by this command")
        flags += [name, str(value)]
    parse_engine_options(flags)
    label = f"Chairlift {arguments.chairlift}".strip()
    return Setting(label, "chairlift_run", Path(sys.executable), {"flags": flags})


def _round(stage: Stage, ours: Setting, theirs: Setting, load: Load, vocab_size: int, number: int) -> tuple[Run, Run]:
    """The two, one after the other; every other round the peer goes first."""
    order = [ours, theirs] if number % 2 == 0 else [theirs, ours]
    runs = {
        setting.label: stage.run(setting, load.job(setting.options, vocab_size, number), beside=theirs.label)
        for setting in order
    }
    return runs[ours.label], runs[theirs.label]


def _perplexities(peer: Peer, context: Context, settings: Sequence[Setting]) -> list[tuple[Setting, Perplexity]]:
    text: Path = context.arguments.perplexity_text
    if peer.perplexity is None:
        raise ConfigError(f"perplexity_text={text}: there is no perplexity of {peer.name} here; leave the option out")
    return [(setting, peer.perplexity(context, setting, text.absolute())) for setting in settings]


def _load(arguments: argparse.Namespace) -> Load:
    workloads = tuple(arguments.workloads.split(","))
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        raise ConfigError(f"workloads={arguments.workloads}: {unknown[0]!r} is none of {', '.join(WORKLOADS)}")
    return replace(
        Load(),
        workloads=workloads,
        num_prompts=arguments.num_prompts,
        seed=arguments.seed,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        single_repeats=arguments.single_repeats,
    )


def _parse(peer: Peer, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    load = Load()
    parser.add_argument("--model", help="a .gguf file; the default model if not given")
    parser.add_argument("--chairlift", default="", help='options of Chairlift\'s engine, such as "--max-num-seqs 64"')
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--seats", type=_positive, help="the same for Chairlift and the peer; each has its own if not given"
    )
    parser.add_argument("--peer-seats", type=_positive, help="of the peer alone")
    parser.add_argument("--num-prompts", type=_positive, default=load.num_prompts, help="of the burst")
    parser.add_argument("--seed", type=int, default=load.seed)
    parser.add_argument("--input-len", default=load.input_len)
    parser.add_argument("--output-len", default=load.output_len)
    parser.add_argument("--single-repeats", type=_positive, default=load.single_repeats)
    parser.add_argument("--num-threads", type=_positive, help="of each engine; all cores if not given")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of environments, builds, models")
    parser.add_argument("--state", type=Path, help="keep finished runs in this folder, and do not repeat them")
    parser.add_argument("--prefix", default="", help='in front of each measured process, such as "taskset -c 0,1"')
    parser.add_argument(
        "--perplexity-text", type=Path, help="measure the peer's perplexity on this UTF-8 text, and no speed"
    )
    parser.add_argument("--install-only", action="store_true", help="install and convert, and stop there")
    peer.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.expanduser().absolute()
    return arguments


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
