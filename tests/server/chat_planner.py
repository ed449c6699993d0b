"""Plans conversations with the chat templates of model families, without a server and without weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.request_limits import RequestLimits
from chairlift.engine.served_engine import EngineFacts, ServedEngine
from chairlift.events import EngineStarted
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.registry import read_hf_config
from chairlift.sampling_params import SamplingDefaults
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ModelPlanner
from support.chat_templates import TEMPLATES
from support.chat_tokenizers import BACKENDS
from support.tiny_engine import CONFIG


@cache
def planner(template: str, **options: Any) -> ModelPlanner:
    """A planner with the template of a family, or of a text, and an engine without weights."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(
        BACKENDS["byte_level"](), special_tokens=special, chat_template=TEMPLATES.get(template, template)
    )
    started = EngineStarted(0.0, "tiny", 16, 60, 8, 512, 512, "fcfs", "paged", True)
    facts = EngineFacts(
        "tiny",
        read_hf_config({**CONFIG, "vocab_size": 10_000}, source="config.json"),
        EngineConfig().scheduler_config(2048),
        KVCachePlan(200, 16, 1024, "memory"),
        RequestLimits(2048, 3200),
        started,
        "torch",
        SamplingDefaults(),
    )
    return ModelPlanner(ServedEngine(facts, tokenizer), ApiOptions(**options))
