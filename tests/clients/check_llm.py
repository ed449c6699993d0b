"""Check of the unmodified command line tool simonw/llm: whole answers, streams, schemas and tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """\
- model_id: chairlift
  model_name: smollm2-135m-instruct
  api_base: "{url}/v1"
  supports_schema: true
  supports_tools: true
"""
DOG = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "has_tail": {"type": "boolean"}},
    "required": ["name", "has_tail"],
    "additionalProperties": False,
}


def llm(home: Path, *arguments: str) -> str:
    """Run the command and return its output."""
    options = ["-m", "chairlift", "--key", "none", "-o", "temperature", "0", "-o", "max_tokens", "40"]
    command = [str(Path(sys.executable).parent / "llm"), *options, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "LLM_USER_PATH": str(home)}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    """Call the server with every option, and check the answers."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "extra-openai-models.yaml").write_text(MODELS.format(url=os.environ["CHAIRLIFT_URL"]))
        streamed = llm(home, "What is the capital of France?")
        assert "Paris" in streamed, streamed
        assert llm(home, "--no-stream", "What is the capital of France?") == streamed
        assert llm(home, "-s", "You are a poet.", "Say hello.")
        dog = json.loads(llm(home, "--schema", json.dumps(DOG), "Invent a dog."))
        assert isinstance(dog["name"], str)
        assert isinstance(dog["has_tail"], bool)
        assert llm(home, "-T", "llm_version", "Say hello.")
    print(f"llm: whole, streamed, system, schema {json.dumps(dog)}, tools")


if __name__ == "__main__":
    main()
