"""Start a server with `chairlift serve`, ask it one question over HTTP and stop it: python ask_server.py COMMAND."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request

QUESTION = "What is the capital of France?"


def ask(url: str) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def main(command: str) -> None:
    start = time.monotonic()
    server = subprocess.Popen([command, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            print(line, end="")
            if found := re.search(r"http://\S+/v1", line):
                answer = ask(found[0])
                print(f"{QUESTION} {answer} ({time.monotonic() - start:.1f} s after the start)")
                assert "Paris" in answer
                return
        raise SystemExit("the server ended before it was ready")
    finally:
        server.terminate()
        server.communicate(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1])
