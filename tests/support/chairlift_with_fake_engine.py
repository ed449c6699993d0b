"""`chairlift` whose engine process is `fake_engine_process.py`, which starts at once, for tests of the front end.

The arguments are those of `chairlift`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from chairlift.engine.process import engine_child

engine_child.ENGINE_COMMAND = (  # type: ignore[misc]
    sys.executable,
    str(Path(__file__).with_name("fake_engine_process.py")),
)

from chairlift.cli.main import main  # noqa: E402 - the engine's command is read when this is imported

if __name__ == "__main__":
    main()
