"""ServedEngine: an engine as front ends use it, whether it runs in their process or in another one."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.config import SchedulerConfig
from chairlift.engine.input_processor import InputProcessor, NoTokenizer
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.lora_adapters import AdapterNames
from chairlift.engine.request_limits import RequestLimits
from chairlift.events import EngineStarted
from chairlift.grammar.compiler import GrammarCompiler
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.lora import LoRARequest
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.pooling import PoolingConfig
from chairlift.sampling_params import SamplingDefaults


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The properties of an engine that are fixed once it is ready.

    Attributes:
        pooling: how the model computes vectors or scores; None if it generates text.
        root: the repository on the Hugging Face hub, or the path, from which the model was loaded.
        lora_modules: the LoRA adapters that were loaded at the start.
        max_loras: the largest number of loaded adapters.
    """

    model_name: str
    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    kv_cache_plan: KVCachePlan
    limits: RequestLimits
    started: EngineStarted
    kernels: str
    sampling_defaults: SamplingDefaults
    pooling: PoolingConfig | None = None
    root: str = ""
    lora_modules: tuple[LoRARequest, ...] = ()
    max_loras: int = 0


class ServedEngine:
    """The facts of an engine, with the tokenizer and the input processor of this process.

    Args:
        tokenizer: the model's tokenizer, or a replacement.
        seed, grammars, id_prefix: as for `InputProcessor`.

    Attributes:
        adapters: the LoRA adapters by name.
    """

    def __init__(
        self,
        facts: EngineFacts,
        tokenizer: Tokenizer | NoTokenizer,
        seed: int | None = None,
        grammars: GrammarCompiler | None = None,
        id_prefix: str = "",
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.adapters = AdapterNames(facts.lora_modules, facts.max_loras)
        self.input_processor = InputProcessor(
            facts.model_config, tokenizer, facts.limits, seed, grammars, id_prefix, pooling=facts.pooling
        )
