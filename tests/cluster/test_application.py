"""The application of Ray Serve: its options and deployments, and options without effect."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift.cluster.application import build_application, read_serve_options
from chairlift.errors import ConfigError, ModelLoadError
from support.tiny_engine import tiny_options

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


def serve_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of `chairlift serve` for a tiny model; those that are None are left out."""
    model = tiny_options(folder)["model"]
    values = {"model": model, "num-threads": 1, "allow-unauthenticated": True, **options}
    return {name: value for name, value in values.items() if value is not None}


def write(folder: Path, **options: Any) -> str:
    file = folder / "chairlift.yaml"
    file.write_text(json.dumps(serve_options(folder, **options)))
    return str(file)


def engines_of(application: Any) -> list[Any]:
    """The deployments of the engines of a built application."""
    return [engine._bound_deployment for engine in application._bound_deployment.init_args[2:]]


def test_the_file_in_deploy_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    monkeypatch.setattr("chairlift.cluster.application.resolve_model", lambda *arguments, **options: None)
    described = yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = ServeDeploySchema.model_validate(described).applications
    assert application.import_path == "chairlift.cluster:app"
    built = build_application(application.args)
    assert built._bound_deployment.name == "ingress"
    assert [engine.name for engine in engines_of(built)] == [each.name for each in application.deployments]


def test_options_reach_the_replicas(tmp_path: Path) -> None:
    """From a file, and from a mapping with its content."""
    options = {"max-num-seqs": 7, "seed": 3, "models": {"b": {"max_num_seqs": 5}}, "allowed-hosts": ["a", "b"]}
    for config in (write(tmp_path, **options), serve_options(tmp_path, **options)):
        served = read_serve_options(config)
        assert (served.engine.max_num_seqs, served.engine.seed) == (7, 3)
        assert served.models.models == {"b": {"max_num_seqs": 5}}
        assert served.access.allowed_hosts is not None


def test_the_environment_has_precedence_over_a_mapping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHAIRLIFT_MAX_NUM_SEQS", "9")
    assert read_serve_options(serve_options(tmp_path, **{"max-num-seqs": 7})).engine.max_num_seqs == 9


def test_a_file_that_cannot_be_read_is_named_with_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        build_application({"config": "none.yaml"})
    assert str(raised.value) == (
        f"config=none.yaml cannot be read: No such file or directory (the path is relative to {tmp_path})"
    )


def test_the_deployment_of_one_model_has_a_name_that_does_not_depend_on_it(tmp_path: Path) -> None:
    """Ray Serve would otherwise delete the old replicas before the new ones run."""
    for name in ("a", "b"):
        built = build_application({"config": serve_options(tmp_path, **{"served-model-name": name})})
        assert [engine.name for engine in engines_of(built)] == ["engine"]
    models = {name: {"model": str(tmp_path)} for name in ("a", "b/c")}
    built = build_application({"config": serve_options(tmp_path, model=None, models=models)})
    assert [engine.name for engine in engines_of(built)] == ["engine-a", "engine-b-c-b9e2be"]


def test_a_model_that_does_not_exist_is_an_error_of_the_build(tmp_path: Path) -> None:
    """Ray Serve then keeps the previous version."""
    with pytest.raises(ModelLoadError, match="there is no such file or folder"):
        build_application({"config": serve_options(tmp_path, model=str(tmp_path / "none"))})


def test_replicas_log_the_lines_of_the_start(tmp_path: Path) -> None:
    """A worker of Ray, which builds the application with `serve deploy`, has another level."""
    built = build_application({"config": serve_options(tmp_path)})
    ingress, (engine,) = built._bound_deployment, engines_of(built)
    assert ingress.init_args[1] == engine.init_args[2] == logging.INFO


def test_the_memory_of_a_replica_may_have_a_unit(tmp_path: Path) -> None:
    built = build_application({"config": serve_options(tmp_path), "memory_per_replica": "2GiB"})
    assert engines_of(built)[0].ray_actor_options["memory"] == 2 << 30


def write_with_key(folder: Path, fields: str, **options: Any) -> str:
    """Write a configuration file with one API key."""
    keys = folder / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "a"\nhash = "{"0" * 64}"\n{fields}\n')
    return write(folder, **{"api-key-file": str(keys), "allow-unauthenticated": None, **options})


def test_a_key_for_a_model_that_is_not_served_is_rejected(tmp_path: Path) -> None:
    file = write_with_key(tmp_path, 'models = ["other"]', **{"served-model-name": "tiny"})
    with pytest.raises(ConfigError, match="limited to the models other, which are not served: the models are tiny"):
        build_application({"config": file})


def test_keys_give_their_weights_to_the_engines(tmp_path: Path) -> None:
    file = write_with_key(tmp_path, "weight = 2.0", **{"scheduling-policy": "fair"})
    setup = build_application({"config": file})._bound_deployment.init_args[0]
    assert setup.models[0].config.tenant_weights


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"replica": 2}, "chairlift.cluster:app: replica is not an option: did you mean replicas?"),
        ({}, {"replicas": "two"}, "chairlift.cluster:app: replicas must be an integer, got 'two'"),
        ({}, {"memory_per_replica": 0}, "memory_per_replica must be a positive amount such as 4GiB"),
        ({}, {"memory_per_replica": "much"}, "memory_per_replica must be a positive amount such as 4GiB"),
        ({}, {"replicas": 0}, "replicas must be at least 1, got 0"),
        ({}, {"max_replicas": 3}, "chairlift.cluster:app: max-replicas is not an option"),
        ({}, {"drain_timeout": [1]}, "chairlift.cluster:app: drain-timeout must be a number, got '[1]'"),
        ({}, {"watchdog_timeout": -1}, "watchdog_timeout must be at least 0, got -1"),
        ({}, {"config": ["a"]}, "config must be the path of a file, or options as `name: value`, got ['a']"),
        ({}, {"config": {"port": "x"}}, "config: port must be an integer, got 'x'"),
        ({}, {"router": "best"}, "chairlift.cluster:app: router is not an option"),
        ({"num-threads": None}, {}, "num_threads is not set"),
        ({"port": 9000}, {}, "port=9000 has no effect in a cluster: set http_options of Ray Serve"),
        ({"timeout-keep-alive": 90}, {}, "timeout_keep_alive has no effect in a cluster: set keep_alive_timeout_s in"),
        ({"replicas": 3}, {}, "replicas has no effect in a cluster: use the argument replicas"),
        ({"header-timeout": 3}, {}, "header-timeout is not an option"),
        ({"drain-timeout": 3}, {}, "use the argument drain_timeout"),
        ({"keep-alive": 5}, {}, "keep_alive has no effect in a cluster"),
        ({"allow-unauthenticated": None}, {}, "there is no API key, and Ray Serve's proxy may be reachable"),
        ({"event-log": "events.jsonl"}, {}, "event_log=events.jsonl is one file, and every replica would write it"),
        ({"batching": "static", "static-run-to": "global"}, {}, "static_run_to=global needs the output lengths of all"),
        (
            {"served-model-name": "a", "models": {"b": {}}},
            {},
            "served_model_name=a is for one model without options of its own: name models with --models",
        ),
        ({"max-num-seq": 3}, {}, "max-num-seq is not an option: did you mean max-num-seqs?"),
    ],
)
def test_wrong_options(options: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        build_application({"config": serve_options(tmp_path, **options), **arguments})
    assert message in str(raised.value)
