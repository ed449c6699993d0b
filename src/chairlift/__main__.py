"""`python -m chairlift` is `chairlift`."""

from __future__ import annotations

import sys
from typing import Final

from chairlift.system.memory_limits import describe_out_of_memory, is_out_of_memory

RESERVE_BYTES: Final = 2 << 20
"""Address space that is kept free for the error message."""


def main() -> None:
    """Run the command line; too little memory ends it with a sentence and exit status 2, also during the imports."""
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
