from __future__ import annotations

import re
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.speculative_config import SpeculativeConfig


def test_the_method_follows_from_the_model() -> None:
    lookup, draft = SpeculativeConfig(), SpeculativeConfig(model="small")
    assert (lookup.method, lookup.max_draft_tokens) == ("ngram", 12)
    assert (draft.method, draft.max_draft_tokens) == ("draft_model", 4)


@pytest.mark.parametrize("name", ["mtp", "qwen3_5_mtp", "qwen3_next_mtp"])
def test_the_names_of_vllm_for_the_predictor_are_one_method(name: str) -> None:
    config = EngineConfig(speculative_config={"method": name})
    assert config.speculative == SpeculativeConfig(method="mtp")
    assert config.speculative.max_draft_tokens == 3
    assert config.needs_predictor
    assert not EngineConfig(speculative_config={}).needs_predictor


def test_an_engine_takes_the_fields_as_a_mapping() -> None:
    config = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert config.speculative == SpeculativeConfig(num_speculative_tokens=3)
    limits = config.scheduler_config(100)
    assert limits.speculative_config == config.speculative
    assert limits.max_logit_rows == 64
    few = EngineConfig(max_num_seqs=2, speculative_config={}).scheduler_config(100)
    assert few.max_logit_rows == 13, "one request can have all of its draft tokens"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "eagle"}, "method must be one of ngram, draft_model, mtp; got 'eagle'"),
        ({"method": "mtp", "model": "small"}, "model needs method=draft_model: remove one of them"),
        ({"method": "mtp", "prompt_lookup_max": 9}, "prompt_lookup_max need method=ngram: remove them, or method=mtp"),
        ({"method": "draft_model"}, "method=draft_model needs model, a draft model; got None"),
        ({"method": "ngram", "model": "small"}, "model needs method=draft_model: remove one of them"),
        ({"quantization": "int8"}, "quantization needs method=draft_model: remove one of them"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 64, got 0"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens must be an integer from 1 to 64, got '5'"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer from 1 to 64, got 0"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_max must be an integer from 5 to 64, got 4"),
        ({"model": "small", "prompt_lookup_min": 3}, "prompt_lookup_min and prompt_lookup_max need method=ngram"),
        ({"tokens": 5}, "speculative_config may have method, .*; got tokens"),
    ],
)
def test_wrong_values_are_rejected(values: dict[str, Any], message: str) -> None:
    pattern = message if ".*" in message else re.escape(message)
    with pytest.raises(ConfigError, match=pattern):
        EngineConfig(speculative_config=values)


def test_contradictory_options_are_rejected() -> None:
    with pytest.raises(ConfigError, match="cannot be combined with static_run_to=global"):
        EngineConfig(speculative_config={}, batching="static", static_run_to="global")
    with pytest.raises(ConfigError, match="needs a block_size of at least 2 with kv=paged"):
        EngineConfig(speculative_config={}, block_size=1)
    EngineConfig(speculative_config={}, block_size=1, kv="exact")
