"""Compares Chairlift with llama-server of llama.cpp, over HTTP with streaming.

    python -m benchmarks.peers.llamacpp [--weights Q4_1,Q4_0,Q8_0] [--seats 16] [--chairlift "..."]

llama.cpp is built for this machine from the source in the sdist of llama-cpp-python. llama-quantize creates the
formats. From a GGUF file they are less accurate than a conversion of the original weights, so Chairlift reads the given
file. From a folder, Chairlift reads the same file as llama-server.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

from benchmarks.peers.compare import Peer, PeerContext, main
from benchmarks.peers.convert import EXPORT_REQUIREMENTS
from benchmarks.peers.environment import SetupError, environment, run, torch_requirement
from benchmarks.peers.report import Perplexity
from benchmarks.peers.stage import EngineSetting

PROGRAMS: Final = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity")
SOURCE_IN_SDIST: Final = "vendor/llama.cpp/"
CMAKE_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # This would be downloaded.
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
SLOT_MARGIN: Final = 8
"""Tokens in the context of a slot beyond the longest request: the server stops a few tokens before its end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", default="Q4_1,Q4_0,Q8_0", help="formats, such as Q4_K_M or BF16")
    parser.add_argument("--server-args", default="", help='more options of llama-server, such as "-fa off"')


def settings(context: PeerContext) -> list[EngineSetting]:
    folder = context.folder / "llama.cpp"
    programs = build(context.folder, folder)
    chosen = []
    for weights in context.arguments.weights.split(","):
        model = requantize(context, programs, weights)
        for seats in context.seats([16]):
            command = server_command(context, programs, model, seats)
            label = f"{weights}, {seats} slots"
            ours = None if context.is_gguf else model
            options = {"command": command}
            chosen.append(EngineSetting(label, "llamacpp_run", Path(sys.executable), options, chairlift_model=ours))
    return chosen


def server_command(context: PeerContext, programs: Path, model: Path, seats: int) -> list[str]:
    """The command of llama-server. Each slot has a context that is long enough for every request."""
    slot = context.workload.max_model_len + SLOT_MARGIN
    threads = str(context.num_threads_or_all)
    options = ["--parallel", str(seats), "--ctx-size", str(seats * slot), "--threads", threads, "--host", "127.0.0.1"]
    quiet = ["--no-context-shift", "--cache-ram", "0", "--no-webui"]
    return [str(programs / "llama-server"), "--model", str(model), *options, *quiet, *server_arguments(context)]


def server_arguments(context: PeerContext) -> list[str]:
    return shlex.split(context.arguments.server_args)


def build(peers: Path, folder: Path) -> Path:
    """Build the programs once, which takes many minutes, and return their folder.

    Raises:
        SetupError: a tool is missing, or the build fails.
    """
    programs = folder / "build" / "bin"
    if all((programs / name).exists() for name in PROGRAMS):
        return programs
    python = environment(peers / "llama.cpp-tools", ("cmake", "ninja"))
    if not (folder / "CMakeLists.txt").exists():
        fetch_source(python, folder)
    cmake, ninja = python.with_name("cmake"), python.with_name("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run([cmake, "-S", folder, "-B", folder / "build", *generator, *CMAKE_OPTIONS])
    run([cmake, "--build", folder / "build", "--target", *PROGRAMS])
    return programs


def fetch_source(python: Path, folder: Path) -> None:
    """Download the source of llama.cpp in the newest sdist of llama-cpp-python."""
    with tempfile.TemporaryDirectory() as temporary:
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", "llama-cpp-python"]
        run([python, "-m", "pip", "--quiet", "download", "--dest", temporary, *wanted])
        (sdist,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary, members=source_members(archive), filter="data")
        sources = list(Path(temporary).glob(f"*/{SOURCE_IN_SDIST}"))
        if len(sources) != 1:
            raise SetupError(f"{sdist.name} has no {SOURCE_IN_SDIST}")
        shutil.copytree(sources[0], folder, dirs_exist_ok=True)


def source_members(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    prefix = tuple(PurePosixPath(SOURCE_IN_SDIST).parts)
    return [member for member in archive.getmembers() if PurePosixPath(member.name).parts[1:3] == prefix]


def requantize(context: PeerContext, programs: Path, weights: str) -> Path:
    """The file of the model in this format. It is created once, unless the name of the given file has the format."""
    if weights in context.model.path.name and context.is_gguf:
        return context.model.path
    infix = "-requantized" if context.is_gguf else ""
    target = context.models / f"{context.model_name}{infix}-{weights}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source = context.model.path if context.is_gguf else bf16_file(context)
        if source != target:
            unfinished = target.with_suffix(".part")
            run([programs / "llama-quantize", "--allow-requantize", source, unfinished, weights])
            unfinished.replace(target)
    return target


def bf16_file(context: PeerContext) -> Path:
    """The GGUF file of a folder in bfloat16, which is created once by the converter of llama.cpp."""
    target = context.models / f"{context.model_name}-BF16.gguf"
    if not target.exists():
        python = environment(context.folder / "transformers", (*EXPORT_REQUIREMENTS, torch_requirement()))
        converter = context.folder / "llama.cpp" / "convert_hf_to_gguf.py"
        unfinished = target.with_suffix(".part")
        # The converter requires the layer of multi-token prediction in folders of Qwen3.5, unless it has this option.
        options = ["--no-mtp"] if context.model_name.startswith("random-qwen3.5") else []
        run([python, converter, context.model.path, *options, "--outtype", "bf16", "--outfile", unfinished])
        unfinished.replace(target)
    return target


def perplexity(context: PeerContext, setting: EngineSetting, text: Path) -> Perplexity:
    """Measure the perplexity with llama-perplexity, which scores the second half of each window. A float32 copy is
    measured too, because `chairlift bench perplexity` scores other tokens."""
    programs = Path(setting.options["command"][0]).parent
    threads = context.num_threads_or_all
    value = estimate_perplexity(programs, Path(setting.options["command"][2]), text, threads)
    float32 = estimate_perplexity(programs, requantize(context, programs, "F32"), text, threads)
    return Perplexity(value, "llama-perplexity: windows of 512 tokens, the second half of each scored", float32)


@cache
def estimate_perplexity(programs: Path, model: Path, text: Path, num_threads: int) -> float:
    command = [programs / "llama-perplexity", "--model", model, "--file", text, "--ctx-size", "512"]
    words = [str(word) for word in [*command, "--threads", num_threads]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise SetupError(f"`{' '.join(words)}` gave no estimate: {done.stderr[-1000:]}")
    return float(found[1])


if __name__ == "__main__":
    main(Peer("llama.cpp", add_arguments, settings, perplexity), __doc__)
