"""One engine through one job, in a process of its own."""

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
from benchmarks.peers.records import Job, Run

from chairlift.errors import ChairliftError

ROOT: Final = Path(__file__).parents[2]
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Not handed on: --num-threads alone decides, for every engine."""


class RunFailedError(ChairliftError):
    """An engine's process failed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine with its settings.

    Attributes:
        label: what the tables call it.
        worker: module below `benchmarks.peers.workers`.
        python: of the engine's environment.
        options: as the worker reads them.
        variables: of its environment.
    """

    label: str
    worker: str
    python: Path
    options: dict[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"label": self.label, "options": self.options, "variables": dict(self.variables)}


@dataclass(frozen=True, slots=True)
class Stage:
    """How the processes of a comparison are run.

    Attributes:
        prefix: a command in front of each measured process, such as `taskset -c 0,1`.
        state: finished runs are kept here and not made again; None: nothing is kept.
    """

    prefix: Sequence[str] = ()
    state: Path | None = None

    def run(self, setting: Setting, job: Job, beside: str) -> Run:
        """The run of the job, out of the folder or made now.

        Args:
            beside: what it is compared with: every comparison has runs of its own, made next to one another.

        Raises:
            RunFailedError: the process failed; it has said why on standard error.
            WrongLengthError: a forced length was missed.
        """
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.state or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            out = folder / f"{setting.worker}-{_digest(setting, job, beside)}.json"
            if not out.exists():
                self._make(setting, job, Path(temporary), out)
            run = Run.read(out)
        check_lengths(setting.label, job, run)
        return run

    def _make(self, setting: Setting, job: Job, temporary: Path, out: Path) -> None:
        job_file = temporary / "job.json"
        job.write(job_file)
        module = f"benchmarks.peers.workers.{setting.worker}"
        command = [*self.prefix, str(setting.python), "-m", module, str(job_file), str(out)]
        print(f"running {setting.label}: {shlex.join(command)}", file=sys.stderr, flush=True)
        code = subprocess.run(command, cwd=ROOT, env=_environment(setting), stdout=sys.stderr, check=False).returncode
        if code != 0 or not out.exists():
            raise RunFailedError(f"{setting.label}: `{shlex.join(command)}` failed with exit code {code}")


def _environment(setting: Setting) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    return {**kept, **setting.variables}


def _digest(setting: Setting, job: Job, beside: str) -> str:
    text = json.dumps([setting.to_dict(), asdict(job), beside], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
