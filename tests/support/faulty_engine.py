"""An engine process with a fault: `python faulty_engine.py FAULT STEP MARKER [fake]`, over a model or a fake.

At step STEP it raises or hangs. FAULT `once-raise` and `once-hang` take effect only if the file MARKER does not exist
yet. Every step takes 10 ms longer, so that a test can act while requests run. While a file `hold` exists beside MARKER,
no step is computed, or none from the number in this file on. The number of the step that waits is then in a file
`held`, and a file `commanded` exists as soon as a command has arrived.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import fake_engine_process

from chairlift.engine.process import engine_process
from chairlift.outputs import SchedulerOutput

FAULT, STEP, MARKER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
STEP_SECONDS = 0.01
HOLD = MARKER.with_name("hold")


def is_held(step: int) -> bool:
    """Whether a step must wait."""
    try:
        return step >= int(HOLD.read_text() or 0)
    except FileNotFoundError:
        return False


class FaultyExecutor(engine_process.AnnouncingExecutor):
    def submit(self, output: SchedulerOutput) -> Any:
        if is_held(output.step):
            new = HOLD.with_name("held.new")
            new.write_text(str(output.step))
            new.replace(HOLD.with_name("held"))  # so that a test reads a whole number
        while is_held(output.step):
            time.sleep(STEP_SECONDS)
            if self._on_start.__self__._link.wait(0.0):
                HOLD.with_name("commanded").touch()
        handle = super().submit(output)
        time.sleep(STEP_SECONDS)
        if output.step == STEP and not (FAULT.startswith("once-") and MARKER.exists()):
            MARKER.touch()
            if FAULT.endswith("raise"):
                raise RuntimeError("device lost")
            if FAULT.endswith("hang"):
                time.sleep(3600)
        return handle


if sys.argv[4:] == ["fake"]:
    engine_process._build = partial(fake_engine_process.build, make_executor=FaultyExecutor)
else:
    engine_process.AnnouncingExecutor = FaultyExecutor  # type: ignore[misc]
engine_process.main()
