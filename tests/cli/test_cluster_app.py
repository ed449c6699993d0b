"""The application of Ray Serve from a configuration file: its models, and options without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift.cli.cluster_app import build_application, read_serve_options
from chairlift.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"

pytest.importorskip("ray")


def write(folder: Path, **options: Any) -> str:
    file = folder / "chairlift.yaml"
    values = {"num-threads": 1, "allow-unauthenticated": True, **options}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return str(file)


def test_the_files_in_deploy_are_valid() -> None:
    described = yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = described["applications"]
    assert application["import_path"] == "chairlift.cluster:app"
    arguments = {**application["args"], "config": str(DEPLOY / "chairlift.yaml")}
    built = build_application(arguments)
    assert built._bound_deployment.name == "ingress"


def test_options_reach_the_replicas(tmp_path: Path) -> None:
    served = read_serve_options(Path(write(tmp_path, **{"max-num-seqs": 7, "seed": 3})))
    assert (served["config"].max_num_seqs, served["config"].seed) == (7, 3)


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
        ({}, {"replica": 2}, "replica: not an argument of chairlift.cluster:app; known are config, replicas"),
        ({}, {"replicas": "two"}, "replicas must be a number, got 'two'"),
        ({}, {"router": "best"}, "router must be one of prefix, pow2, got 'best'"),
        ({"num-threads": None}, {}, "num_threads is not set"),
        ({"port": 9000}, {}, "port=9000 has no effect in a cluster: set http_options of Ray Serve"),
        ({"replicas": 3}, {}, "replicas has no effect in a cluster: use the argument replicas"),
        ({"header-timeout": 3}, {}, "header_timeout has no effect in a cluster"),
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
        ({"max-num-seq": 3}, {}, "max-num-seq is not an option of this command: did you mean max-num-seqs"),
    ],
)
def test_wrong_options(options: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        build_application({"config": write(tmp_path, **options), **arguments})
    assert message in str(raised.value)
