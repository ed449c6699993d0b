"""Runs one job on one engine in a separate process."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.figures import check_lengths
from benchmarks.peers.records import EngineRun, Job

from chairlift.errors import ChairliftError

ROOT: Final = Path(__file__).parents[2]
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that engines do not inherit, so that only --num-threads determines their threads."""


class RunFailedError(ChairliftError):
    """Raised if the process of an engine failed."""


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """An engine with its settings.

    Attributes:
        label: name in tables.
        worker: module in `benchmarks.peers.workers`.
        python: the Python of the environment of the engine.
        options: options that the worker reads.
        variables: environment variables of the process.
        chairlift_model: the file that Chairlift reads next to this peer, if it is not the model of the command.
    """

    label: str
    worker: str
    python: Path
    options: dict[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    chairlift_model: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """The setting for JSON."""
        return {"label": self.label, "options": self.options, "variables": dict(self.variables)}


@dataclass(frozen=True, slots=True)
class StageRunner:
    """Runs the processes of a comparison.

    Attributes:
        prefix: a command before each measured process, such as `taskset -c 0,1`.
        state: folder in which finished runs are kept, and not repeated; None keeps none.
    """

    prefix: Sequence[str] = ()
    state: Path | None = None

    def run(self, setting: EngineSetting, job: Job, opponent: str) -> EngineRun:
        """Read the run of the job from the folder, or make it.

        Args:
            opponent: label of the other engine. Each comparison has its own runs, which are neighbours in time.

        Raises:
            RunFailedError: the process failed. Its message is on standard error.
            WrongLengthError: an output does not have its forced length.
        """
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.state or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            out = folder / f"{setting.worker}-{_digest(setting, job, opponent)}.json"
            if not out.exists():
                self._make(setting, job, Path(temporary), out)
            run = EngineRun.read(out)
        check_lengths(setting.label, job, run)
        return run

    def _make(self, setting: EngineSetting, job: Job, temporary: Path, out: Path) -> None:
        job_file = temporary / "job.json"
        job.write(job_file)
        module = f"benchmarks.peers.workers.{setting.worker}"
        command = [*self.prefix, str(setting.python), "-m", module, str(job_file), str(out)]
        print(f"running {setting.label}: {shlex.join(command)}", file=sys.stderr, flush=True)
        code = subprocess.run(command, cwd=ROOT, env=_environment(setting), stdout=sys.stderr, check=False).returncode
        if code != 0 or not out.exists():
            raise RunFailedError(f"{setting.label}: `{shlex.join(command)}` failed with exit code {code}")


def _environment(setting: EngineSetting) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    return {**kept, **setting.variables}


def _digest(setting: EngineSetting, job: Job, opponent: str) -> str:
    text = json.dumps([setting.to_dict(), asdict(job), opponent], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
