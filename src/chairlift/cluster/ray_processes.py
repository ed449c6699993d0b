"""RayProcesses: the processes of a Ray on this machine, which end with this process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
from ray._common.utils import get_default_system_temp_dir
from ray._private import services

from chairlift.system.child_process import ChildProcess

NODE_SECONDS: Final = 120.0
"""Maximum seconds until a node of Ray is registered. Ray waits for 30, which the start on a busy machine exceeds."""
SHUTDOWN_SECONDS: Final = 0.4
"""Maximum seconds in which the processes of Ray can end by themselves. A second signal ends the server 1.2 s later."""
KILL_SECONDS: Final = 0.2
"""Maximum seconds that `ray.shutdown` may take to return after the processes of Ray were killed."""

KILL_GROUP_AT_END_OF_INPUT: Final = ("sh", "-c", "read -r _; kill -KILL 0")
"""A process that kills its process group when the process that has started it ends in any way."""

GCS_SERVER: Final = "gcs_server"
VITAL_PROCESSES: Final = (GCS_SERVER, "raylet")
"""The processes without which no replica can be started, by the names of their programs."""


class RayProcesses:
    """Starts a Ray on this machine with this process as its driver. Its files, sockets and token are in a private
    folder.

    Ray would start its processes in the process group of the server. A signal to this group, for example of Ctrl-C at a
    terminal or of `timeout`, would then end them while the server still answers requests, and `ray.shutdown` would wait
    for them without a limit. Therefore they are in a separate group, with a watchdog that ends the whole group with
    this process: Ray's agents would continue for a minute.

    Args:
        on_loss: called on another thread with the reason when a vital process has ended. Replicas continue to run.
        options: arguments of `ray.init`.

    Attributes:
        folder: the private folder. It is removed by `stop`, unless a vital process has ended: it has the logs of Ray.

    Raises:
        OSError: there is no writable folder for temporary files. Then as for `ray.init`.
    """

    def __init__(self, on_loss: Callable[[str], None], **options: Any) -> None:
        self._on_loss = on_loss
        self._is_stopped = False
        self._has_loss = False
        self._vital: dict[str, subprocess.Popen[bytes]] = {}
        os.environ.pop("RAY_TMPDIR", None)  # The paths of sockets in a long one would be too long.
        system_folder: str = get_default_system_temp_dir()  # type: ignore[no-untyped-call]
        self.folder = Path(tempfile.mkdtemp(prefix="chairlift-ray-", dir=system_folder))
        self._watchdog = ChildProcess(KILL_GROUP_AT_END_OF_INPUT, stdout=None, process_group=0)
        try:
            write_token(self.folder / "auth_token")
            if os.name == "posix":
                self._watchdog.start()
            with self._own_group():
                # Ray makes this folder accessible to all users, so that it must be in a private one.
                ray.init(logging_level=logging.WARNING, _temp_dir=str(self.folder / "ray"), **options)
        except BaseException:
            self.stop()
            raise
        atexit.register(self.stop)
        for name, process in self._vital.items():
            threading.Thread(target=self._watch, args=(name, process), name=f"watch-{name}", daemon=True).start()

    @contextlib.contextmanager
    def _own_group(self) -> Iterator[None]:
        """Let Ray start its processes in the process group of the watchdog, and wait for its node."""
        processes, popen, get_node = self, services.ConsolePopen, services.get_node

        class GroupedProcess(popen):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, process_group=processes._watchdog.pid, **options)
                if (name := Path(arguments[0][0]).name) in VITAL_PROCESSES:
                    processes._vital[name] = self

        services.ConsolePopen = GroupedProcess  # type: ignore[misc]
        services.get_node = partial(wait_for_node, get_node)
        try:
            yield
        finally:
            services.ConsolePopen = popen  # type: ignore[misc]
            services.get_node = get_node

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Report the end of a vital process."""
        status = process.wait()
        if self._is_stopped or self._has_loss:
            return
        self._has_loss = True
        # Without the raylet, the GCS would soon end this process without a message.
        self._vital[GCS_SERVER].kill()
        self._on_loss(f"{name} of Ray has ended with status {status}; the logs of Ray are in {self.folder}")

    def stop(self) -> None:
        """End all processes of this Ray: with `ray.shutdown`, and with SIGKILL those that do not end in time."""
        if self._is_stopped:
            return
        self._is_stopped = True
        # It may never return, because it waits for processes of Ray that have ended.
        shutdown = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        shutdown.start()
        try:
            shutdown.join(SHUTDOWN_SECONDS)
            self._watchdog.close()
            shutdown.join(KILL_SECONDS)
        finally:  # also after a signal
            if shutdown.is_alive():
                # The interpreter would call it at its exit too, and wait for the lock of the first call.
                atexit.unregister(ray.shutdown)
        if not self._has_loss:
            shutil.rmtree(self.folder, ignore_errors=True)


def wait_for_node(get_node: Callable[..., Any], *arguments: str) -> Any:
    """Call `get_node` until the node is registered; raises RuntimeError after NODE_SECONDS."""
    deadline = time.monotonic() + NODE_SECONDS
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def write_token(path: Path) -> None:
    """Write a new token into a new file that only this user can read, and let Ray use it.

    Raises:
        FileExistsError: the file exists, also as a symbolic link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # has precedence
