"""The command line; tests of the process start one."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from unittest import mock

import openai
import pytest

import chairlift
from chairlift.__main__ import main as run_process
from chairlift.cli.main import main, run_command
from chairlift.errors import ConfigError
from chairlift.lab.bench.workload_options import WorkloadOptions
from chairlift.options import declared_options
from chairlift.server.access.keys import load_keys
from chairlift.slo import SLO
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.command_runner import all_commands, arguments_of, invoke, options_of
from support.native import unavailable_reason
from support.shown_lines import OF_THE_START, lines_not_printed
from support.waiting import AMPLE_SECONDS

COMMAND = [sys.executable, "-m", "chairlift"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=wide, check=False)


def help_of(command: str) -> str:
    return invoke([command, "--help"], {"COLUMNS": "200"}).stdout


def test_version_and_help() -> None:
    assert run("version").stdout.strip() == invoke(["--version"]).stdout.strip() == chairlift.__version__
    listed = invoke(["--help"]).stdout
    assert all(command in listed for command in ("generate", "chat", "serve", "bench", "pull"))
    assert "--max-num-batched-tokens" in help_of("serve")


@pytest.mark.parametrize("names", [*all_commands()], ids=" ".join)
def test_the_help_fits_80_columns_and_cuts_no_name(names: tuple[str, ...]) -> None:
    text = invoke([*names, "--help"], {"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    shown = [argument for argument in arguments_of(*names) if argument.show]
    assert all(name in text for argument in shown for name in argument.names if name.startswith("--"))
    assert all(argument.parameter.help for argument in shown)


def test_every_engine_option_is_an_option_of_the_command_line() -> None:
    names = {field.name for field in fields(chairlift.EngineConfig)}
    assert declared_options(chairlift.EngineConfig).keys() == names
    for command in ("serve", "batch"):
        assert {f"--{name.replace('_', '-')}" for name in names - {"model"}} <= options_of(command)


def test_sampling_defaults_reach_the_configuration_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[chairlift.EngineConfig] = []
    monkeypatch.setattr("chairlift.server.serve.run", lambda options, *_: taken.append(options.engine))
    options = ["--generation-config", "vllm", "--override-generation-config"]
    assert invoke(["serve", *options, '{"temperature": 0.5}']).exit_code == 0
    assert [(config.generation_config, config.override_generation_config) for config in taken] == [
        ("vllm", {"temperature": 0.5})
    ]
    error = invoke(["serve", *options, "[1]"]).exception
    assert str(error) == "override_generation_config must be a JSON object such as {\"temperature\": 0.5}, got '[1]'"


def test_every_field_of_a_workload_is_an_option() -> None:
    assert declared_options(WorkloadOptions).keys() == {field.name for field in fields(WorkloadOptions)}
    assert {"--workload-seed", "--num-prompts", "--trace"} <= options_of("bench", "throughput")


REFUSE_IMPORTS = """
import sys

def refuse(event, arguments):
    if event == "import" and arguments[0] in ("chairlift.lab", "matplotlib", "transformers", "scipy", "pandas"):
        with open({path!r}, "a") as file:
            file.write(arguments[0] + " ")
        raise ImportError(arguments[0])

sys.addaudithook(refuse)
"""


def test_serve_imports_no_laboratory_or_slow_library_and_ends_on_sigterm(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Its log lines are as documented. Their last part needs a context of 8192 tokens."""
    refused = tmp_path / "refused"
    (tmp_path / "sitecustomize.py").write_text(REFUSE_IMPORTS.format(path=str(refused)))  # also of the engine's process
    command = [*COMMAND, "serve", "--port", "0", "--num-kv-blocks", "512", "--num-threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"ready in [\d.]+ s: (\S+) answers", line):
            break
    else:
        raise AssertionError("".join(lines))
    client = openai.OpenAI(base_url=found[1], api_key="unused")
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=3, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert any("KV pool: 512 blocks of 16 slots" in line for line in lines)
    if unavailable_reason() is None:
        assert [line for document in OF_THE_START for line in lines_not_printed(document, lines)] == []
    assert not refused.exists(), refused.read_text()
    process.send_signal(signal.SIGTERM)
    process.stderr.read()
    assert process.wait(AMPLE_SECONDS) in (0, -signal.SIGTERM)


def test_generate_prints_the_answers_in_order(smollm2_gguf: Path) -> None:
    options = ["--no-chat", "--max-tokens", "3", "--num-kv-blocks", "50", "--num-threads", "1"]
    result = invoke(["generate", "The capital of France is", "The capital of Germany is", *options])
    lines = [line for line in result.stdout.splitlines() if line.startswith("The capital")]
    assert lines[0].startswith("The capital of France is Paris")
    assert lines[1].startswith("The capital of Germany is Berlin")


def test_bench_throughput_prints_a_table_or_one_json_line(tiny_model_dir: Callable[..., Path]) -> None:
    load = ["--num-prompts", "6", "--input-len", "fixed:9", "--output-len", "uniform:2..5", "--repeats", "2"]
    engine = ["--model", str(tiny_model_dir("llama")), "--num-kv-blocks", "40", "--num-threads", "1"]
    result = invoke(["bench", "throughput", *engine, *load])
    assert result.exit_code == 0, result.output
    assert "output tokens" in result.stdout
    assert "{" not in result.stdout
    result = invoke(["bench", "throughput", *engine, *load, "--json"])
    record = json.loads(result.stdout)
    assert len(record) > 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["bench", "throughput", "--input-len", "zipf:3"], "zipf"),
        (["serve", "no-such-model", "--port", "0"], "no-such-model.*no such file or folder"),
        (["serve", "a:x:0", "--port", "0"], "model 'a:x:0': there is no such file or folder"),
        (
            ["serve", "--gpu-memory-utilization=0.9"],
            "--gpu-memory-utilization is not an option: use --kv-cache-memory-",
        ),
        (
            ["serve", "--no-enable-chunked-prefill"],
            "--no-enable-chunked-prefill is not an option: leave it out, because",
        ),
        (
            ["serve", "--n-predict", "5"],
            '--n-predict is not an option: use --override-generation-config, as in .{"max_n',
        ),
        (["chat", "--grammar", "x"], "Unknown option: --grammar."),
        (["generate", "--format", "json"], "Unknown option: --format."),
        (["generate", "--n-predict", "5"], "--n-predict is not an option: use --max-tokens"),
        (["serve", "-c", "4096"], "-c is not an option: use --max-model-len"),
        (["serve", "-ngl", "99"], "-ngl is not an option: leave it out, because an engine uses one device"),
        (["serve", "-hf", "a/b:Q4_K_M"], "-hf is not an option: .*, as in `chairlift COMMAND MODEL`"),
        (["generate", "-hf", "a/b"], "-hf is not an option: use --model$"),
        (["serve", "-m", "a"], "-m is not an option: .*, as in `chairlift COMMAND MODEL`"),
        (["bench", "throughput", "--hf-repo", "a/b"], "--hf-repo is not an option: use --model$"),
        (["serve", "a/b-GGUF:Q4_K_M", "--port", "0"], "on the Hugging Face hub write a/b-GGUF, or a/b-GGUF/FILE.gguf"),
        (["chat", "--model", "x"], "--model is not an option: .*, as in `chairlift COMMAND MODEL`"),
        (["generate", "--enable-lora", "hi"], "--enable-lora is not an option: .* because --lora-modules and --max-l"),
        (["serve", "m", "--lora-modules", "a=b", "c=d"], "Unused Tokens: .*c=d.* option before each of its values"),
        (["serve", "--max-num-seq", "3"], "Unknown option: --max-num-seq. Did you mean --max-num-seqs?"),
        (["serve", "--kv-cache-memory-bytes", "lots"], "must be a positive amount"),
        (
            ["serve", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "max_num_batched_tokens=8 must be at least",
        ),
        (["generate", "hi", "--device", "cuda"], "sees no CUDA device|device"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be in"),
        (
            ["generate", "hi", "--dtype", "int3"],
            "--dtype must be one of auto, .*, got 'int3': .* set quantization for w",
        ),
        (["serve", "--port", "80a"], "--port must be an integer, got '80a'"),
        (["serve", "--max-num-seqs", "10000000"], "max_num_seqs must be at most 65536, got 10000000"),
        (["top", "--nothing"], "Unknown option: --nothing. `chairlift top --help` lists the options"),
        (["serve", "qwen"], "model 'qwen': there is no such file .* on the Hugging Face hub write OWNER/qwen; a model"),
        (["plan", "smollm2"], r"did you mean smollm2-135m-instruct\?"),
        (["simulate", "--trace", "unknown"], "unknown: cannot be read .*; the path is relative to /"),
        (["generate", "hi", "--num-threads", "1000"], "num_threads=1000 exceeds the limit of 256"),
        (["generate", "hi", "--num-kv-blocks", "100000000"], "TiB, more than the .* this process may use: lower num"),
    ],
)
def test_errors_end_with_a_message_and_status_2(
    arguments: list[str], match: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    monkeypatch.setattr(sys, "argv", ["chairlift", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert re.search(match, capsys.readouterr().err, re.DOTALL)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_standard_output_is_explained(unbuffered: str) -> None:
    own = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "version"], stdout=full, stderr=subprocess.PIPE, env=own, text=True, check=False
        )
    problem = "error: the standard output cannot be written: No space left on device; free space, or redirect it to"
    assert (done.returncode, done.stderr) == (1, f"{problem} another file\n")


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_error_of_another_file_is_not_one_of_the_standard_output(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chairlift.cli.main.run_command", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    if is_closed:
        monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OSError, match="full"):
        main()
    assert capsys.readouterr().out == ""


def test_a_reader_of_the_standard_output_may_end_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run([*COMMAND, "version"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_standard_output_may_be_closed() -> None:
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "version"]
    done = subprocess.run(closing, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_standard_input_that_is_not_text_is_rejected(
    command: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = with_byte_tokenizer(tiny_model_dir("llama", vocab_size=VOCAB_SIZE), tmp_path)
    model = ["--model", str(folder)] if command == "generate" else [str(folder)]
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    problem = r"the standard input cannot be decoded: .*0xe9.* convert it to utf-8,"
    with mock.patch("sys.stdin", stdin), pytest.raises(ConfigError, match=problem):
        run_command([command, *model, "--num-kv-blocks", "20", "--num-threads", "1"])


def test_a_key_with_an_slo_is_an_entry_of_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(invoke(["key", "bob", "--slo", "ttft:500 tpot:50"]).stdout)
    assert load_keys(file).current("bob").slo == SLO(500, 50)
    assert "slo must be ttft:MILLISECONDS" in str(invoke(["key", "bob", "--slo", "e2e:5"]).exception)


CRASH_AT_EXIT = """
import atexit, ctypes, sys, types
from chairlift.__main__ import main
c = ctypes.CDLL(None)
c.__cxa_atexit(ctypes.cast(c.abort, ctypes.c_void_p), None, None)
atexit.register(print, "the functions of atexit have run")
if {has_ray}:
    sys.modules["ray"] = types.ModuleType("ray")
sys.argv = ["chairlift", *{arguments}]
main()
"""


def test_ctrl_c_during_the_imports_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.__main__.run_command_line", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(sys.modules, "ray", None)  # With it, the process of the tests would end.
    with pytest.raises(SystemExit) as ended:
        run_process()
    assert ended.value.code == 130


@pytest.mark.skipif(sys.platform != "linux", reason="uses a function of glibc")
@pytest.mark.parametrize(
    ("has_ray", "arguments", "status"),
    [(True, ["serve", "--port", "-1"], 2), (True, ["version"], 0), (False, ["version"], -signal.SIGABRT)],
)
def test_a_process_that_has_used_ray_is_not_finalized(has_ray: bool, arguments: list[str], status: int) -> None:
    """The finalization, in which threads of Ray may crash, is here one that always crashes."""
    code = CRASH_AT_EXIT.format(has_ray=has_ray, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert "the functions of atexit have run" in done.stdout
    assert ("error: port must be from 1" in done.stderr) == (status == 2)


@pytest.mark.parametrize(("ending", "status"), [("SystemExit(None)", 0), ("KeyboardInterrupt", 130)])
def test_a_process_that_has_used_ray_ends_without_finalization_in_every_way(ending: str, status: int) -> None:
    code = f"""
import ctypes, sys, types
from chairlift import __main__ as entry
c = ctypes.CDLL(None)
c.__cxa_atexit(ctypes.cast(c.abort, ctypes.c_void_p), None, None)
sys.modules["ray"] = types.ModuleType("ray")
sys.stdout.close()
sys.stderr = None
def end():
    raise {ending}
entry.run_command_line = end
entry.main()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == status


def test_a_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert "cannot listen on 127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr
