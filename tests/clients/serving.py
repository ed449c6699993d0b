"""Run a command beside a server of the default model: `python serving.py COMMAND...`.

The command gets the address of the server as CHAIRLIFT_URL, in its environment and its arguments. The exit status is
that of the command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

SERVE = [sys.executable, "-m", "chairlift", "serve", "--port", "0", "--num-kv-blocks", "400"]


def main() -> int:
    """Start the server, run the command, and stop the server."""
    with subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"(http://\S+)/v1 answers", line)))
        command = [argument.replace("CHAIRLIFT_URL", url) for argument in sys.argv[1:]]
        try:
            return subprocess.run(command, env={**os.environ, "CHAIRLIFT_URL": url}, check=False).returncode
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
