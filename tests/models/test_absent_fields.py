"""A field that a config.json does not contain has the value of transformers, or the shapes of tensors show another."""

from __future__ import annotations

import json
from typing import Any

from chairlift.errors import ModelLoadError
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_hf_config
from support.case_loop import loop_over
from support.tiny_models import TINY_MODELS, make_tiny_config

SHOWN_BY_SHAPES = {"head_dim", "num_key_value_heads"}
OF_THE_CHECKPOINT = {"architectures", "bos_token_id", "dtype", "eos_token_id", "model_type", "pad_token_id"}

DELIBERATE = {("olmo_hybrid", "rope_parameters")}
"""A comment in transformers says that null stands for no rotary embedding, as in the released files, but its
configuration class replaces null by a base."""


def read(config: dict[str, Any]) -> ModelConfig | None:
    try:
        return read_hf_config(config, source="config.json")
    except ModelLoadError:
        return None


@loop_over("arch", TINY_MODELS)
def test_absent_fields_have_the_values_of_transformers(arch: str) -> None:
    model_class, config = make_tiny_config(arch)
    text = config.get_text_config()
    fields = json.loads(text.to_json_string(use_diff=False))
    fields.pop("time_step_limit", None)  # The class does not take the list of a file.
    fields["architectures"] = [model_class.__name__.replace("ConditionalGeneration", "CausalLM")]
    assert read(fields) is not None
    wrong = []
    for key in fields.keys() - SHOWN_BY_SHAPES - OF_THE_CHECKPOINT:
        rest = {name: value for name, value in fields.items() if name != key}
        default = getattr(type(text), key, None)
        if isinstance(fields[key], list | dict):
            default = json.loads(type(text)(**rest).to_json_string(use_diff=False))[key]
        elif not isinstance(default, bool | int | float | str):
            continue  # It has no value.
        given, absent = read({**fields, key: default}), read(rest)
        if None not in (given, absent) and given != absent:
            wrong.append((key, default))
    assert [each for each in wrong if (arch, each[0]) not in DELIBERATE] == []
