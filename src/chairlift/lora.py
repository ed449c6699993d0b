"""LoRARequest: the name and the files of a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter of an engine, with the fields of vLLM.

    Attributes:
        lora_name: the name that requests select it by.
        lora_int_id: a number above 0. The engine numbers the adapters that it loads itself, and never uses a number
            again, so that K and V of an earlier adapter with the same name are not found in the prefix cache.
        lora_path: a folder with adapter_config.json and adapter_model.safetensors.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
