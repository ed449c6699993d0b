"""Options of `chairlift serve`: several models, adapters, the environment and a YAML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.options import parse_paths
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.preparation.api_options import ApiOptions
from support.command_runner import invoke, run_arguments


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server is started with."""
    taken: dict[str, Any] = {}
    monkeypatch.setattr("chairlift.server.serve.run", lambda *given: taken.update(run_arguments(*given)))
    return taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three models, of which one is split, and two other files."""
    for name in ("one", "no-model"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    for number in (1, 2):
        (tmp_path / f"parts-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def serve(*arguments: str, **environment: str) -> None:
    result = invoke(["serve", *arguments], environment)
    if result.exception is not None:
        raise result.exception


def names(served: dict[str, Any]) -> dict[str, str | None]:
    specs: list[ModelSpec] = served["models"]
    return {spec.name: spec.config.model for spec in specs}


def test_one_model_is_loaded_at_the_start(served: dict[str, Any], folder: Path) -> None:
    serve(str(folder / "one"))
    assert (served["models"], served["config"].model) == (None, str(folder / "one"))
    serve()
    assert (served["models"], served["config"].model) == (None, None)


def test_several_models_and_a_folder(served: dict[str, Any], folder: Path) -> None:
    serve(str(folder / "one"), "some/hub-model", "--max-num-seqs", "3", "--models-memory-bytes", "2GiB")
    assert names(served) == {"one": str(folder / "one"), "some/hub-model": "some/hub-model"}
    assert [spec.config.max_num_seqs for spec in served["models"]] == [3, 3]
    assert [spec.keep_alive for spec in served["models"]] == [300.0, 300.0]
    assert served["memory_budget"] == 2 << 30
    parts = str(folder / "parts-00001-of-00002.gguf")
    serve("--model-dir", str(folder))
    assert names(served) == {"one": str(folder / "one"), "parts": parts, "two": str(folder / "two.gguf")}
    serve("two", "parts", "--model-dir", str(folder), "--keep-alive", "-1")
    assert names(served) == {"two": str(folder / "two.gguf"), "parts": parts}
    assert served["models"][0].keep_alive is None


def test_options_of_single_models_in_a_file(served: dict[str, Any], folder: Path) -> None:
    config = folder / "serve.yaml"
    config.write_text(
        f"""
        model: [{folder}/one]
        max-num-seqs: 5
        keep-alive: 60
        models:
          small:
            model: {folder}/two.gguf
            aliases: [s, tiny]
            quantization: int8
            kv-cache-memory-bytes: 1GiB
            keep-alive: -1
            reasoning-parser: none
          {folder}/two.gguf:
        """
    )
    serve("--config", str(config))
    one, small, plain = served["models"]
    assert (one.name, one.config.max_num_seqs, one.keep_alive, one.api.reasoning_parser) == ("one", 5, 60.0, "auto")
    assert (small.name, small.aliases, small.keep_alive) == ("small", ("s", "tiny"), None)
    assert (small.config.quantization, small.config.kv_cache_memory_bytes) == ("int8", 1 << 30)
    assert (small.config.max_num_seqs, small.api.reasoning_parser) == (5, "none")
    assert plain.config.model == str(folder / "two.gguf")


def test_a_path_with_spaces_in_the_environment_is_one_model(served: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "my model"
    path.mkdir()
    serve(CHAIRLIFT_MODEL=str(path))
    assert served["config"].model == str(path)
    serve(CHAIRLIFT_MODEL="some/model other/model")
    assert names(served) == {"some/model": "some/model", "other/model": "other/model"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "[1]"], "models must be a JSON object such as"),
        (["--models", '{"a": 1}'], "models: a: must have options as `name: value`, got 1"),
        (["--models", '{"a": {"quantisation": "int8"}}'], "quantisation is not an option: did you mean quantization?"),
        (
            ["--models", '{"a": {"quantization": "int7"}}'],
            "models: a: quantization must be one of int8, q8_0, q4_0, q4_1, got 'int7'",
        ),
        (["--models", '{"a": {"max_num_seqs": "many"}}'], "models: a: max-num-seqs must be an integer, got 'many'"),
        (["--models", '{"a": {"keep_alive": -2}}'], "keep_alive must be a number of seconds, or -1 for no limit"),
        (
            ["--models", '{"a": {"keep_alive": NaN}}'],
            "keep_alive must be a number of seconds, or -1 for no limit, got nan",
        ),
        (["a", "--keep-alive", "inf"], "keep_alive must be a number of seconds, or -1 for no limit, got inf"),
        (["--models", '{"a": {}, "b": {"aliases": ["a"]}}'], "two models have the name 'a': a and b"),
        (["a", "b", "--lora-modules", "b=./sql"], "two models or LoRA adapters have the name 'b': ./sql and b"),
        (
            ["a", "--lora-modules", "a=./sql"],
            "adapters have the name 'a': a and ./sql; give one of them another name with --models or --lora-modules",
        ),
        (
            ["x/a", "--served-model-name", "b", "--lora-modules", "b=./sql"],
            "two models or LoRA adapters have the name 'b': x/a and ./sql",
        ),
        (
            ["--models", '{"a": {"lora-modules": ["b=./sql"]}, "b": {}}'],
            "two models or LoRA adapters have the name 'b': ./sql and b",
        ),
        (["a", "b", "--lora-modules", "sql=./sql"], "LoRA adapters have the name 'sql': ./sql and ./sql; give"),
        (["x/one", "y/two", "--event-log", "log"], "event_log is one file, and there are 2 models"),
        (["--models-memory-bytes", "lots"], "models_memory_bytes must be a positive amount"),
        (["--model-dir", "nowhere"], "model_dir=nowhere: No such file or directory"),
        (["a", "b", "--device", "cuda"], "several models on device=cuda need --models-memory-bytes"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, served: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r".") as failed:
        serve(*arguments)
    assert message in str(failed.value)
    assert not served


def test_a_folder_without_models(served: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contains no model: a model is a folder with config.json or a .gguf file"):
        serve("--model-dir", str(tmp_path))


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


def test_a_missing_file_is_rejected_and_an_empty_one_changes_nothing(tmp_path: Path, served: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read: No such file"):
        serve("--config", str(tmp_path / "none.yaml"))
    serve("--config", write(tmp_path, "# nothing\n"))
    assert served["port"] == 8000


def test_adapters_are_named_on_the_command_line() -> None:
    assert parse_paths(["a=one", "b=/x/y=z"], "lora_modules") == {"a": "one", "b": "/x/y=z"}
    assert parse_paths(['{"name": "a", "path": "one"}', "b=two"], "lora_modules") == {"a": "one", "b": "two"}
    listed = [{"name": "a", "path": "one", "base_model_name": "m"}, {"name": "b", "path": "two"}]
    for items in (listed, json.dumps(listed), [json.dumps(listed)], [json.dumps(each) for each in listed]):
        assert parse_paths(items, "lora_modules") == {"a": "one", "b": "two"}
    assert parse_paths([], "lora_modules") is None


@pytest.mark.parametrize(
    "items",
    [
        ["a"],
        ["=x"],
        ["a="],
        ["a=x", "a=y"],
        [5],
        [["a=x"]],
        [{"name": "a", "path": 5}],
        [{"name": 5, "path": "x"}],
        [{"name": "a", "path": "x", "rank": 8}],
    ],
)
def test_other_forms_are_errors(items: list[Any]) -> None:
    with pytest.raises(ConfigError, match="lora_modules must be name=path with distinct names, got"):
        parse_paths(items, "lora_modules")
