"""The entry point of the command `chairlift` and of `python -m chairlift`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import Final, NoReturn

from chairlift.system.memory_limits import describe_out_of_memory, is_out_of_memory

RESERVE_BYTES: Final = 2 << 20
"""Address space that is reserved until an error message has to be written."""


def main() -> None:
    """Run the command line, and end this process."""
    status = 0
    try:
        run_command_line()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        status = ended.code or 0
    except KeyboardInterrupt:  # Ctrl-C was pressed during the imports.
        status = 128 + signal.SIGINT
    if sys.modules.get("ray") is not None:
        end_without_finalization(status)
    raise SystemExit(status)


def run_command_line() -> None:
    """Run the command line. If memory runs out, even during the imports, print one line and exit with status 2."""
    reserve = bytearray(RESERVE_BYTES)
    try:
        from chairlift.cli.main import main as run

        run()
    except Exception as error:
        del reserve
        if not is_out_of_memory(error):
            raise
        print(f"error: {describe_out_of_memory(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def end_without_finalization(status: int) -> NoReturn:
    """End this process after the functions of `atexit`, without the finalization of the interpreter.

    Threads of Ray that wait for a GCS which has ended cannot be stopped. They would use what the finalization destroys,
    and the process would end with a segmentation fault instead of its exit status.
    """
    atexit._run_exitfuncs()  # Child processes of multiprocessing end in the same way.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # It may be closed or None.
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
