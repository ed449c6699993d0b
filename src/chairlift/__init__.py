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
    from chairlift.config import EngineConfig as EngineConfig
    from chairlift.engine.async_llm import AsyncLLM as AsyncLLM
    from chairlift.engine.llm import LLM as LLM
    from chairlift.lora import LoRARequest as LoRARequest
    from chairlift.outputs import CompletionOutput as CompletionOutput
    from chairlift.outputs import RequestOutput as RequestOutput
    from chairlift.sampling_params import SamplingParams as SamplingParams
    from chairlift.slo import SLO as SLO
    from chairlift.structured_outputs import StructuredOutputs as StructuredOutputs

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

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'chairlift' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
