"""Run a command beside a server of the default model: `python serving.py [--scripted] COMMAND...`.

The command gets the address of the server as CHAIRLIFT_URL, in its environment and its arguments. With --scripted the
server has the embedding model `tiny-bert` too, and CHAIRLIFT_SCRIPTED_URL is the address of a second server, whose
model `scripted` answers by the rules of `script.json`. The exit status is that of the command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
SERVE = ["serve", "--port", "0", "--num-kv-blocks", "400"]


@contextmanager
def running(*command: str, **environment: str) -> Iterator[str]:
    """Run a server; yields its address."""
    environment = {**os.environ, **environment}
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        try:
            address = _address(server.stderr)
            reader = threading.Thread(target=deque, args=(server.stderr, 0))  # or the server could not write its log
            reader.start()
            yield address
        finally:
            server.terminate()
        reader.join()


def _address(log: IO[str]) -> str:
    """Read the log of a server until it has its address.

    Raises:
        RuntimeError: the server has ended. The message is its log.
    """
    lines = []
    for line in log:
        lines.append(line)
        if found := re.search(r"(http://\S+)/v1 (answers|load)", line):
            return found[1]
    raise RuntimeError("".join(lines))


def write_embedding_model(folder: Path) -> str:
    """Write a tiny BERT without weights."""
    from support.pooling_models import SIZES, write_tokenizer

    write_tokenizer(folder)
    config: dict[str, Any] = {"architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2, **SIZES}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu", "layer_norm_eps": 1e-12}))
    return str(folder)


@contextmanager
def scripted_servers(folder: Path) -> Iterator[dict[str, str]]:
    """Run the two servers of --scripted; yields their addresses."""
    from support.chat_templates import QWEN3

    models = {
        "smollm2-135m-instruct": {"model": "smollm2-135m-instruct", "num-kv-blocks": 400},
        "tiny-bert": {"model": write_embedding_model(folder), "load-format": "dummy"},
    }
    (template := folder / "template.jinja").write_text(QWEN3)
    scripted = [str(HERE / "scripted_engine.py"), "serve", "--port", "0", "--chat-template", str(template)]
    script = (HERE / "script.json").read_text()
    with (
        running("-m", "chairlift", "serve", "--port", "0", "--models", json.dumps(models)) as url,
        running(*scripted, SCRIPTED_ANSWERS=script) as scripted_url,
    ):
        yield {"CHAIRLIFT_URL": url, "CHAIRLIFT_SCRIPTED_URL": scripted_url}


def main() -> int:
    """Start the servers, run the command, and stop the servers."""
    with ExitStack() as stack:
        if sys.argv[1] == "--scripted":
            arguments = sys.argv[2:]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls = stack.enter_context(scripted_servers(folder))
        else:
            arguments = sys.argv[1:]
            urls = {"CHAIRLIFT_URL": stack.enter_context(running("-m", "chairlift", *SERVE))}
        command = [argument.replace("CHAIRLIFT_URL", urls["CHAIRLIFT_URL"]) for argument in arguments]
        return subprocess.run(command, env={**os.environ, **urls}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
