"""`chairlift serve` with keys and TLS, and `chairlift key`, as separate processes."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from certificates import self_signed

from chairlift.errors import ConfigError
from chairlift.server.access.keys import load_keys
from support.command_runner import invoke
from support.waiting import AMPLE_SECONDS

COMMAND = [sys.executable, "-m", "chairlift"]


def test_a_new_key_is_shown_once_and_accepted_by_a_server_over_tls(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    made = subprocess.run(
        [*COMMAND, "key", "alice", "--weight", "2", "--max-concurrent", "3"], capture_output=True, text=True, check=True
    )
    key_file = tmp_path / "keys.toml"
    key_file.write_text(made.stdout)
    secret = made.stderr.strip().removeprefix("alice: ")
    assert secret not in made.stdout
    found = load_keys(key_file).find(secret)
    assert found is not None
    assert found.name == "alice"

    certificate, private_key = self_signed(tmp_path)
    options = ["--skip-tokenizer-init", "--num-kv-blocks", "60", "--num-threads", "1", "--port", "0"]
    options += ["--api-key-file", str(key_file), "--scheduling-policy", "fair"]
    options += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(private_key)]
    environment = {**os.environ, "CHAIRLIFT_API_KEY": "ops=ops-secret other-secret"}
    process = subprocess.Popen(
        [*COMMAND, "serve", str(tiny_model_dir("llama")), *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    url = next(found[1] for line in process.stderr if (found := re.search(r"ready in \S+ s: (\S+)/v1", line)))
    assert url.startswith("https://127.0.0.1")
    trusted = ssl.create_default_context(cafile=str(certificate))
    body = {"prompt": [3, 4], "max_tokens": 3, "ignore_eos": True}
    with httpx.Client(base_url=url, verify=trusted) as client:
        page = client.get("/v1/page", headers={"Authorization": "Bearer ops-secret"}).json()
        assert not page["control"], "a server with keys needs --page-control"
        (model,) = client.get("/v1/models", headers={"Authorization": "Bearer ops-secret"}).json()["data"]
        assert model["status"]["memory_bytes"] > 50 * 2**20, "an interpreter with torch takes more"
        statuses = [
            client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).status_code
            for key in (secret, "ops-secret", "other-secret", "ops=ops-secret", "wrong")
        ]
        with client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers={"x-api-key": secret}
        ) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
    assert statuses == [200, 200, 200, 401, 401]
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http") + "/health")
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(AMPLE_SECONDS) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["serve", "--host", "0.0.0.0"], "can be reached from other machines, and there is no API key"),
        (["serve", "--api-key", "x", "--allow-unauthenticated"], "no effect with API keys"),
        (["serve", "--api-key-file", "no-such.toml"], "no-such.toml: No such file"),
        (["serve", "--ssl-certfile", "cert.pem"], "must be given together"),
        (["serve", "--max-queued-requests", "0"], "max_queued_requests must be at least 1"),
        (
            ["serve", "--event-log", "no/such.jsonl"],
            "event_log=no/such.jsonl: No such file or directory; create the folder no",
        ),
        (
            ["serve", "--record-trace", "no/such"],
            "record_trace=no/such: No such file or directory; create the folder no",
        ),
        (["serve", "--tenant-weights", "a=2"], "tenant_weights need scheduling_policy=fair"),
        (["serve", "--length-predictor", "oracle"], "length_predictor=oracle needs the output lengths of all requests"),
        (["serve", "--kv", "oracle"], "kv=oracle needs the output lengths of all requests in advance"),
        (["serve", "--kv", "pow2"], "set --kv paged, exact or max, or use it offline"),
        (["serve", "--share-prefix-cache"], "share_prefix_cache has no effect without API keys"),
        (["serve", "--max-lora-rank", "64"], "max_lora_rank=64 needs lora_modules or max_loras"),
        (["serve", "--scheduling-policy", "srpt", "--length-predictor", "none"], "set --length-predictor history"),
        (["serve", "--port", "99999"], "port must be from 1 to 65535, or 0 for a free port, got 99999: choose another"),
        (["serve", "--kv-cache-memory-bytes", "lots"], "kv_cache_memory_bytes must be a positive amount such as 4GiB"),
        (["key", "a b"], "Expected `str` matching regex"),
        (["key", "a", "--weight", "-1"], "Expected `float` > 0.0 - at `$.weight`"),
    ],
)
def test_option_errors_are_raised_before_the_model_is_loaded(
    arguments: list[str], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    monkeypatch.setattr(
        "chairlift.engine.process.process_client.ProcessClient.__init__", lambda *_, **__: pytest.fail("loads")
    )
    error = invoke(arguments).exception
    assert isinstance(error, ConfigError)
    assert match in str(error)
