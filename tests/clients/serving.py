"""`python serving.py COMMAND...`: run a command beside a server of the default model, whose address it finds in
CHAIRLIFT_URL; ends with its exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys

SERVE = [sys.executable, "-m", "chairlift", "serve", "--port", "0", "--num-kv-blocks", "400"]


def main() -> int:
    """Serve, call, stop."""
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
