"""Tests options of `chairlift serve` from the environment and from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.server.preparation.api_options import ApiOptions
from support.command_runner import invoke, run_arguments


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server is started with."""
    taken: dict[str, Any] = {}
    monkeypatch.setattr("chairlift.server.serve.run", lambda *given: taken.update(run_arguments(*given)))
    return taken


def serve(*arguments: str, **environment: str) -> None:
    result = invoke(["serve", *arguments], environment)
    if result.exception is not None:
        raise result.exception


def write(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_options_of_every_kind_are_read_from_a_file(served: dict[str, Any], tmp_path: Path) -> None:
    text = """
    model: some/model
    port: 8123
    max-num-seqs: 5
    max_model_len: 512
    watchdog-timeout: 2.5
    enable-prefix-caching: false
    skip-tokenizer-init: true
    kv-cache-memory-bytes: 2GiB
    speculative-config: {method: ngram}
    tenant-weights: {a: 1, b: 2}
    lora-modules: {sql: ./sql, poems: ./poems}
    scheduling-policy: fair
    api-key: [first-secret-1234567, name=second-secret-123456]
    allowed-hosts: [a.example, "*.b.example"]
    allowed-origins: ["https://page.example"]
    page-control: true
    seed:
    """
    serve("--config", write(tmp_path, text))
    config = served["config"]
    assert (config.model, served["port"], config.max_num_seqs, config.max_model_len) == ("some/model", 8123, 5, 512)
    assert (served["watchdog_timeout"], config.enable_prefix_caching, config.skip_tokenizer_init) == (2.5, False, True)
    assert config.kv_cache_memory_bytes == 2 << 30
    assert config.speculative_config.method == "ngram"
    assert config.tenant_weights == {"a": 1, "b": 2}
    assert config.lora_modules == {"sql": "./sql", "poems": "./poems"}
    assert len(served["access"].keys) == 2
    assert served["access"].allowed_origins == ("https://page.example",)
    assert served["access"].allowed_hosts is not None
    assert served["page_control"]
    assert config.seed is None


def test_the_command_line_has_precedence_and_then_the_environment(served: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, "max-num-seqs: 2\nport: 2\nblock-size: 32\nmodel: of/the-file\n")
    environment = {"CHAIRLIFT_MAX_NUM_SEQS": "3", "CHAIRLIFT_PORT": "3", "CHAIRLIFT_MODEL": "of/the-environment"}
    serve("--config", path, "--max-num-seqs", "4", **environment)
    config = served["config"]
    assert (config.max_num_seqs, served["port"], config.block_size) == (4, 3, 32)
    assert config.model == "of/the-environment"
    serve("of/the-command-line", **environment, CHAIRLIFT_CONFIG=path)
    assert served["config"].model == "of/the-command-line"
    assert served["config"].block_size == 32
    assert served["host"] == "127.0.0.1"


def test_every_option_has_a_variable(served: dict[str, Any]) -> None:
    serve(CHAIRLIFT_ENABLE_PREFIX_CACHING="false", CHAIRLIFT_SKIP_TOKENIZER_INIT="1", CHAIRLIFT_PAGE_CONTROL="true")
    assert (served["config"].enable_prefix_caching, served["config"].skip_tokenizer_init) == (False, True)
    assert served["page_control"]
    serve(CHAIRLIFT_API_KEY="first-secret-1234567 second=second-secret-1234", CHAIRLIFT_WATCHDOG_TIMEOUT="0")
    assert len(served["access"].keys) == 2
    assert served["watchdog_timeout"] == 0


def test_an_empty_variable_sets_nothing(served: dict[str, Any], tmp_path: Path) -> None:
    names = ("MAX_NUM_SEQS", "PORT", "ENABLE_PREFIX_CACHING", "SKIP_TOKENIZER_INIT", "PREFIX_CACHE_DIR", "API_KEY")
    empty = {f"CHAIRLIFT_{name}": "" for name in (*names, "CONFIG")}
    serve(**empty)
    config = served["config"]
    assert (config, served["port"], len(served["access"].keys)) == (EngineConfig(), 8000, 0)
    serve("--config", write(tmp_path, "max-num-seqs: 2\nskip-tokenizer-init: true\n"), **empty)
    assert (served["config"].max_num_seqs, served["config"].skip_tokenizer_init) == (2, True)


@pytest.mark.parametrize("value", [-1, 0, float("nan"), "x", None])
def test_the_weights_of_a_mapping_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tenant_weights must be .* with weights above 0, got 'a="):
        EngineConfig(tenant_weights={"a": value, "b": 2}, scheduling_policy="fair")


def test_a_template_is_text_only_with_tags_or_lines(served: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "{chat}.jinja"
    with pytest.raises(ConfigError, match=r"chat_template='.*/\{chat\}\.jinja' cannot be read: .*No such file"):
        serve("--chat-template", str(path))
    path.write_text("{{ messages[0].content }}")
    assert ApiOptions(chat_template=str(path)).chat_template == path.read_text()
    for text in ("{{ messages }}", "{% if x %}", "a\nb"):
        assert ApiOptions(chat_template=text).chat_template == text


def test_the_variables_of_a_kubernetes_service_are_ignored(served: dict[str, Any]) -> None:
    address = {"CHAIRLIFT_PORT_8000_TCP": "tcp://10.0.0.1:8000", "CHAIRLIFT_PORT_8000_TCP_ADDR": "10.0.0.1"}
    service = {"CHAIRLIFT_SERVICE_HOST": "10.0.0.1", "CHAIRLIFT_PROXY_SERVICE_PORT_HTTP": "80"}
    serve(CHAIRLIFT_PORT="tcp://10.0.0.1:8000", **address, **service)
    assert served["port"] == 8000


@pytest.mark.parametrize(
    ("name", "hint"),
    [("CHAIRLIFT_MAX_NUM_SEQ", r"did you mean CHAIRLIFT_MAX_NUM_SEQS\?"), ("CHAIRLIFT_ZZZ", "remove it")],
)
def test_a_variable_that_no_option_has_is_an_error(served: dict[str, Any], name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"the environment variable {name} is not an option: {hint}"):
        serve(**{name: "3"})
    serve(**{name: ""}, CHAIRLIFT_CACHE="/tmp/x", CHAIRLIFT_CPU_ISA="avx2", CHAIRLIFT_URL="http://127.0.0.1:8000/v1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 3", r"serve.yaml: max-num-seq is not an option: did you mean max-num-seqs\?"),
        ("served-model-name: [a, b]", r'must be one name, got \["a", "b"\]: set aliases in models'),
        ("zzz: 3", "zzz is not an option; options are model, host, port,"),
        ("hf: a/b", "hf is not an option; options are"),
        ("help: true", "help is not an option"),
        ('event-log: "a\\0b"', "serve.yaml: event-log contains a null character: remove it"),
        ("max-num-seqs: many", "config=.*serve.yaml: max-num-seqs must be an integer, got 'many'"),
        ("max-num-seqs: 2.5", "max-num-seqs must be an integer, got '2.5'"),
        ("max-num-seqs: true", "max-num-seqs must be a number or text, got true: write text in quotes"),
        ("quantization: off", "quantization must be a number or text, got false: write text in quotes"),
        ("enable-prefix-caching: 'off'", "enable-prefix-caching must be true or false, got 'off'"),
        ("watchdog-timeout: -1", "watchdog_timeout must be at least 0, got -1"),
        ("block-size: 2\nblock_size: 3", "block_size is given twice"),
        ("- port", "must contain options as `name: value`, got"),
        ("port: [", "is not valid YAML: while parsing"),
        ("port: !!python/object:os.system x", "is not valid YAML: could not determine a constructor"),
        ("batching: fast", "serve.yaml: batching must be one of continuous, static, got 'fast'"),
        ("kv: fast", "kv must be one of paged, exact, .*module:Class, got 'fast'"),
    ],
)
def test_wrong_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve("--config", write(tmp_path, text))


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read: No such file"):
        serve("--config", str(tmp_path / "none.yaml"))


def test_an_empty_file_changes_nothing(served: dict[str, Any], tmp_path: Path) -> None:
    serve("--config", write(tmp_path, "# nothing\n"))
    assert served["port"] == 8000
