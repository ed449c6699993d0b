"""Chairlift: continuous batching and paged KV memory for large language models.

    from chairlift import LLM, SamplingParams
    print(LLM().chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text)

The modules of these names are imported at their first use (PEP 562), so importing the package alone is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chairlift.version import __version__ as __version__

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.engine.llm import LLM
    from chairlift.lora import LoRARequest
    from chairlift.outputs import CompletionOutput, RequestOutput
    from chairlift.sampling_params import SamplingParams
    from chairlift.slo import SLO
    from chairlift.structured_outputs import StructuredOutputs

_MODULES = {
    "AsyncLLM": "chairlift.engine.async_llm",
    "CompletionOutput": "chairlift.outputs",
    "EngineConfig": "chairlift.config",
    "LLM": "chairlift.engine.llm",
    "LoRARequest": "chairlift.lora",
    "RequestOutput": "chairlift.outputs",
    "SLO": "chairlift.slo",
    "SamplingParams": "chairlift.sampling_params",
    "StructuredOutputs": "chairlift.structured_outputs",
}

__all__ = [
    "LLM",
    "SLO",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
