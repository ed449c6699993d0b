"""The common part of all commands: their options, the rounds and the report."""

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
from benchmarks.peers.figures import run_figures
from benchmarks.peers.random_model import RANDOM_MODELS, random_model
from benchmarks.peers.records import WORKLOADS
from benchmarks.peers.report import MeasuredSetting, Perplexity, print_perplexities, print_report
from benchmarks.peers.stage import EngineSetting, StageRunner
from benchmarks.peers.workload import PeerWorkload, copying_requests
from rich.console import Console

from chairlift.errors import ChairliftError, ConfigError
from chairlift.lab.bench.machine import machine_facts
from chairlift.loading.model_source import GGUFSource, ModelSource
from chairlift.loading.resolve import resolve_model


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that Chairlift is compared with.

    Attributes:
        name: name of the engine in tables and in the JSON line.
        add_arguments: adds the options that only this peer has.
        settings: installs the engine if it is missing, and returns the settings to measure.
        perplexity: measures the perplexity of a text file with a setting; None if the peer cannot.
        has_prefix_cache: whether the peer can be measured with a prefix cache.
    """

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    settings: Callable[[PeerContext], list[EngineSetting]]
    perplexity: Callable[[PeerContext, EngineSetting, Path], Perplexity] | None = None
    has_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class PeerContext:
    """The options of a comparison, the model and the workload.

    Attributes:
        arguments: arguments of the command line, including those of the peer.
        model: a .gguf file, or a folder with config.json and safetensors.
        workload: the requests of both engines.
    """

    arguments: argparse.Namespace
    model: ModelSource
    workload: PeerWorkload

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.model, GGUFSource)

    @property
    def dtype(self) -> str:
        """The data type of computations: that of the folder, or float32 for a .gguf file."""
        return "float32" if self.is_gguf else self.model.config().dtype

    @property
    def models(self) -> Path:
        """Folder of converted models."""
        return self.folder / "models"

    @property
    def model_name(self) -> str:
        """Beginning of the names of converted models."""
        return self.model.path.stem if self.is_gguf else self.model.path.name

    @property
    def folder(self) -> Path:
        """Folder of environments, builds and converted models."""
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
        """The value of `--peer-seats` or else of `--seats`; without both, `default`."""
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
    files = _model(arguments)
    workload = _workload(arguments, files)
    if workload.shared_prefix and not peer.has_prefix_cache:
        raise ConfigError(f"shared_prefix={workload.shared_prefix}: {peer.name} is measured without prefix cache")
    chairlift_setting(arguments, files.path)  # Reports wrong options before the peer is installed.
    context = PeerContext(arguments, files, workload)
    settings = peer.settings(context)
    if arguments.install_only:
        return
    if arguments.perplexity_text is not None:
        perplexities = _perplexities(peer, context, settings)
        print_perplexities(peer.name, arguments.perplexity_text, perplexities, Console())
        return
    vocab_size = files.config().vocab_size
    stage = StageRunner(shlex.split(arguments.prefix), arguments.state)
    measured = [
        MeasuredSetting(chairlift_setting(arguments, setting.chairlift_model or files.path), setting)
        for setting in settings
    ]
    for number in range(arguments.rounds):
        for entry in measured:
            _run_round(stage, entry, workload, vocab_size, number)
    print_report(peer.name, machine_facts(), workload, measured, Console())


def _model(arguments: argparse.Namespace) -> ModelSource:
    """The model of `--model`. A random model is created if it is missing."""
    name: str | None = arguments.model
    files = resolve_model(str(random_model(name, arguments.folder / "models")) if name in RANDOM_MODELS else name)
    if files.path.suffix == ".json":
        raise ConfigError(f"model={name}: a config.json has no weights that peers can read: give a folder with weights")
    return files


def chairlift_setting(arguments: argparse.Namespace, model: Path) -> EngineSetting:
    """The setting of Chairlift: the options in `--chairlift`, and those that this command gives both engines.

    Raises:
        ConfigError: an option is unknown, given twice, or has an invalid value.
    """
    given = shlex.split(arguments.chairlift)
    flags = list(given)
    own = {"--model": model, "--max-num-seqs": arguments.seats, "--num-threads": arguments.num_threads}
    for name, value in own.items():
        if value is None:
            continue
        if any(flag.split("=")[0] == name for flag in given):
            raise ConfigError(
                f"chairlift={arguments.chairlift!r}: {name} is given for both engines by this command: leave it out"
            )
        flags += [name, str(value)]
    parse_engine_options(flags)
    label = f"Chairlift {arguments.chairlift}".strip()
    return EngineSetting(label, "chairlift_run", Path(sys.executable), {"flags": flags})


def _run_round(
    stage: StageRunner, entry: MeasuredSetting, workload: PeerWorkload, vocab_size: int, number: int
) -> None:
    """Run both engines, one after the other, and add their figures. In every second round the peer is first."""
    ours, theirs = entry.ours, entry.setting
    order = [ours, theirs] if number % 2 == 0 else [theirs, ours]
    runs = {
        setting.label: stage.run(setting, workload.job(setting.options, vocab_size, number), opponent=theirs.label)
        for setting in order
    }
    pair = runs[ours.label], runs[theirs.label]
    entry.rounds.append((run_figures(pair[0], workload.prompt_len), run_figures(pair[1], workload.prompt_len)))
    entry.engines = (pair[0].engine, pair[1].engine)


def _perplexities(
    peer: Peer, context: PeerContext, settings: Sequence[EngineSetting]
) -> list[tuple[EngineSetting, Perplexity]]:
    text: Path = context.arguments.perplexity_text
    if peer.perplexity is None:
        raise ConfigError(
            f"perplexity_text={text}: the perplexity of {peer.name} cannot be measured: leave the option out"
        )
    return [(setting, peer.perplexity(context, setting, text.absolute())) for setting in settings]


def _workload(arguments: argparse.Namespace, files: ModelSource) -> PeerWorkload:
    workloads = tuple(arguments.workloads.split(","))
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        raise ConfigError(f"workloads={arguments.workloads}: {unknown[0]!r} must be one of {', '.join(WORKLOADS)}")
    return replace(
        PeerWorkload(),
        workloads=workloads,
        prompt_len=arguments.prompt_len,
        num_prompts=arguments.num_prompts,
        seed=arguments.seed,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        repeats=arguments.repeats,
        shared_prefix=arguments.shared_prefix,
        copying=copying_requests(files, arguments.copying) if arguments.copying else (),
    )


def _parse(peer: Peer, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    workload = PeerWorkload()
    parser.add_argument(
        "--model", help=f".gguf file, folder, or {', '.join(RANDOM_MODELS)}; default: the default model"
    )
    parser.add_argument("--chairlift", default="", help='options of Chairlift\'s engine, such as "--max-num-seqs 64"')
    parser.add_argument("--rounds", type=_positive, default=3)
    parser.add_argument("--workloads", default=",".join(workload.workloads), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--seats", type=_positive, help="seats of both engines; default: each engine has its own")
    parser.add_argument("--peer-seats", type=_positive, help="seats of the peer")
    parser.add_argument("--prompt-len", type=_positive, default=workload.prompt_len, help="tokens of each prompt")
    parser.add_argument("--num-prompts", type=_positive, default=workload.num_prompts, help="requests in the burst")
    parser.add_argument("--seed", type=int, default=workload.seed)
    parser.add_argument("--input-len", default=workload.input_len)
    parser.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        help="tokens that all prompts of the burst share, with prefix caches",
    )
    parser.add_argument("--output-len", default=workload.output_len)
    parser.add_argument("--repeats", type=_positive, default=workload.repeats, help="requests of prompt and of single")
    parser.add_argument("--copying", type=_positive, help="number of requests of single that repeat their prompt")
    parser.add_argument("--num-threads", type=_positive, help="number of threads of each engine; default: all cores")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="for environments, builds and models")
    parser.add_argument("--state", type=Path, help="keep finished runs in this folder, and do not repeat them")
    parser.add_argument("--prefix", default="", help='command before each measured process, such as "taskset -c 0,1"')
    parser.add_argument(
        "--perplexity-text", type=Path, help="measure the peer's perplexity on this UTF-8 text, and no speed"
    )
    parser.add_argument("--install-only", action="store_true", help="only install the peer and convert the model")
    peer.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.expanduser().absolute()
    return arguments


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
