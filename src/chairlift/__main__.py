"""The entry point of the command `chairlift` and of `python -m chairlift`."""

from __future__ import annotations

import sys
from typing import Final

from chairlift.system.memory_limits import describe_out_of_memory, is_out_of_memory

RESERVE_BYTES: Final = 2 << 20
"""Address space that is reserved until an error message has to be written."""


def main() -> None:
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


if __name__ == "__main__":
    main()
