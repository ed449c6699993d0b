"""RemoteEngine: the properties of an engine in another process, and its configuration for a restart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.engine.input_processor import InputProcessor, NoTokenizer
from chairlift.engine.process.wire import EngineFacts
from chairlift.events import EngineStarted
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.config import ModelConfig
from chairlift.worker.kv_cache_plan import KVCachePlan


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """The facts that an engine process has reported, with the front end's own tokenizer and input processor."""

    facts: EngineFacts
    tokenizer: Tokenizer | NoTokenizer
    input_processor: InputProcessor

    @classmethod
    def create(cls, facts: EngineFacts, tokenizer: Tokenizer | NoTokenizer, seed: int | None = None) -> RemoteEngine:
        """Create the front end's view of an engine; `seed` as for `InputProcessor`."""
        return cls(facts, tokenizer, InputProcessor(facts.model_config, tokenizer, facts.limits, seed))

    @property
    def model_config(self) -> ModelConfig:
        return self.facts.model_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.facts.scheduler_config

    @property
    def kv_cache_plan(self) -> KVCachePlan:
        return self.facts.kv_cache_plan

    @property
    def model_name(self) -> str:
        return self.facts.model_name

    @property
    def started(self) -> EngineStarted:
        return self.facts.started


def restart_config(config: EngineConfig, facts: EngineFacts, run: int) -> EngineConfig:
    """The configuration of the restart number `run`: the limits of the first engine, because requests were checked
    against them, and log files of its own."""
    return replace(
        config,
        num_kv_blocks=facts.kv_cache_plan.num_blocks,
        kv_cache_memory_bytes=None,
        max_model_len=facts.scheduler_config.max_model_len,
        max_num_batched_tokens=facts.scheduler_config.max_num_batched_tokens,
        event_log=_numbered(config.event_log, run),
        record_trace=_numbered(config.record_trace, run),
    )


def _numbered(path: Path | None, run: int) -> Path | None:
    return None if path is None else path.with_name(f"{path.stem}.{run}{path.suffix}")
