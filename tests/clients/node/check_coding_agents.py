"""Check of coding agents: each of them runs a command that the model calls, and gets an answer with its output.

`python check_coding_agents.py [AGENT...]` runs all agents, or those that are named.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

URL = os.environ["CHAIRLIFT_SCRIPTED_URL"]
PROMPT = "Compute 40 + 2 with the shell."
ANSWER = "The answer is chairlift-42."

CODEX = f"""\
model = "scripted"
model_provider = "chairlift"
model_context_window = 65536
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.chairlift]
name = "Chairlift"
base_url = "{URL}/v1"
"""
QWEN = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
OPENCODE = {
    "model": "chairlift/scripted",
    "autoupdate": False,
    "share": "disabled",
    "permission": "allow",
    "provider": {
        "chairlift": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{URL}/v1"},
            "models": {"scripted": {"limit": {"context": 65_536, "output": 8192}}},
        }
    },
}
PI = {
    "providers": {
        "chairlift": {
            "baseUrl": f"{URL}/v1",
            "api": "openai-completions",
            "apiKey": "none",
            "models": [{"id": "scripted"}],
        }
    },
}
CONTINUE = f"""\
name: chairlift
version: 1.0.0
schema: v1
models:
  - name: chairlift
    provider: openai
    model: scripted
    apiBase: {URL}/v1
    apiKey: none
    capabilities: [tool_use]
"""


@dataclass(frozen=True)
class Agent:
    """How to run an agent once, without questions.

    Attributes:
        environment: its variables.
        files: its configuration, by the path below the home directory.
    """

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


AGENTS = {
    "codex": Agent(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        files={".codex/config.toml": CODEX},
    ),
    "claude": Agent(
        ("claude", "--dangerously-skip-permissions", "-p", PROMPT),
        {
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "scripted",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "qwen": Agent(
        ("qwen", "--auth-type", "openai", "--yolo", "-p", PROMPT),
        {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"},
        {".qwen/settings.json": json.dumps(QWEN)},
    ),
    "opencode": Agent(
        ("opencode", "run", PROMPT),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "pi": Agent(
        ("pi", "--model", "chairlift/scripted", "-p", PROMPT),
        {"PI_OFFLINE": "1"},
        {".pi/agent/models.json": json.dumps(PI)},
    ),
    "copilot": Agent(
        ("copilot", "--allow-all-tools", "-p", PROMPT),
        {"COPILOT_PROVIDER_BASE_URL": f"{URL}/v1", "COPILOT_MODEL": "scripted", "COPILOT_OFFLINE": "true"},
    ),
    "cline": Agent(
        (
            "sh",
            "-c",
            f"cline auth openai --apikey none --modelid scripted --baseurl {URL}/v1 && cline -P openai '{PROMPT}'",
        )
    ),
    "cn": Agent(
        ("cn", "--auto", "-p", PROMPT), {"CONTINUE_TELEMETRY_ENABLED": "0"}, {".continue/config.yaml": CONTINUE}
    ),
}


def run(name: str, agent: Agent) -> None:
    """Run an agent in an empty home directory, and check its answer."""
    home = Path("home", name).absolute()
    shutil.rmtree(home, ignore_errors=True)
    (project := home / "project").mkdir(parents=True)
    for path, text in agent.files.items():
        (file := home / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **agent.environment}
    done = subprocess.run(
        agent.command,
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ANSWER in done.stdout, done.stdout + done.stderr
    version = subprocess.run([name, "--version"], env=environment, capture_output=True, text=True, check=True)
    print(f"{name} {version.stdout.splitlines()[0]}: a command of the shell and an answer", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or AGENTS:
        run(name, AGENTS[name])
