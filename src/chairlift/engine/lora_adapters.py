"""The LoRA adapters of an engine: their names in the front end, and their matrices in the engine core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from chairlift.counts import are, counted
from chairlift.errors import ModelLoadError, RequestError
from chairlift.lora import LoRARequest
from chairlift.models.declaration.model_config import ModelConfig

if TYPE_CHECKING:
    from chairlift.kernels.lora import LoraAdapters


MAX_NAME_CHARACTERS: Final = 256


class AdapterNames:
    """The adapters that requests can select.

    Args:
        modules: the adapters that the engine has loaded at its start.
        max_loras: the largest number of loaded adapters.
    """

    def __init__(self, modules: Sequence[LoRARequest], max_loras: int) -> None:
        self._by_name = {module.lora_name: module for module in modules}
        self._max_loras = max_loras
        self._last_id = len(modules)
        self._leaving: dict[int, LoRARequest] = {}

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(self._by_name.values())

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def in_memory(self) -> list[LoRARequest]:
        """All adapters in the memory of the engine, including those that are removed when their requests end."""
        return [*self._by_name.values(), *self._leaving.values()]

    def find(self, name: str) -> LoRARequest:
        """The adapter of this name. Raises RequestError if there is none."""
        if name not in self._by_name:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError(f"lora_name={name!r:.100} is not loaded; the loaded adapters are: {known}", "lora_name")
        return self._by_name[name]

    def check_new(self, name: str, path: str) -> LoRARequest:
        """The record of an adapter that is about to be loaded.

        Raises:
            RequestError: the name is in use, or there is no memory for another adapter.
        """
        for field, value in (("lora_name", name), ("lora_path", path)):
            if not isinstance(value, str) or not value:
                raise RequestError(f"{field} must be a string that is not empty, got {value!r:.100}", field)
        if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
            raise RequestError(
                f"lora_name must have at most {MAX_NAME_CHARACTERS} printable characters, got {name!r:.100}",
                "lora_name",
            )
        if name in self._by_name:
            raise RequestError(
                f"lora_name={name!r:.100} is loaded from {self._by_name[name].lora_path}: unload it first, or use "
                "another name",
                "lora_name",
            )
        if len(self.in_memory) >= self._max_loras:
            used = f"{counted(len(self._by_name), 'adapter')} {are(len(self._by_name))} loaded"
            if self._leaving:
                used += f", and {len(self._leaving)} {are(len(self._leaving))} in use until the last request ends"
            unload = "unload one, or " if self._max_loras else ""
            raise RequestError(
                f"max_loras={self._max_loras} does not allow another LoRA adapter ({used}): {unload}start the engine "
                "with a larger --max-loras",
                "lora_name",
            )
        self._last_id += 1
        return LoRARequest(name, self._last_id, path)

    def add(self, module: LoRARequest) -> None:
        """Let requests select an adapter."""
        self._by_name[module.lora_name] = module

    def remove(self, name: str) -> LoRARequest:
        """Let no further request select an adapter; `release` follows when no request uses it."""
        module = self.find(name)
        del self._by_name[name]
        self._leaving[module.lora_int_id] = module
        return module

    def release(self, lora_id: int) -> None:
        """Let the memory of an adapter be used again, because it is no longer loaded."""
        self._leaving.pop(lora_id, None)
        self._by_name = {name: module for name, module in self._by_name.items() if module.lora_int_id != lora_id}


class AdapterLoader:
    """Loads adapters into the memory of a model.

    Args:
        lora: the adapters of the model; None if it has no memory for any.
    """

    def __init__(self, config: ModelConfig, lora: LoraAdapters | None) -> None:
        self._config = config
        self._lora = lora

    def load_all(self, modules: Mapping[str, str]) -> tuple[LoRARequest, ...]:
        """Load the adapters of a new engine instead of all others, and number them from 1.

        Raises:
            ModelLoadError: as `load`.
        """
        if self._lora is not None:
            self._lora.clear()
        loaded = tuple(LoRARequest(name, index, path) for index, (name, path) in enumerate(modules.items(), 1))
        for module in loaded:
            self.load(module)
        return loaded

    def load(self, module: LoRARequest) -> None:
        """Read an adapter, and copy it to a free slot once all of it is checked.

        Raises:
            ModelLoadError: the adapter is not supported, does not fit the model, or cannot be read.
        """
        from chairlift.loading.lora_adapter import read_lora_adapter  # imports torch

        if self._lora is None or not self._lora.num_free:
            raise ModelLoadError(f"adapter {module.lora_name!r}: the engine has no memory for it: increase --max-loras")
        try:
            matrices = read_lora_adapter(module.lora_path, self._config, self._lora.max_rank)
        except ModelLoadError as error:
            raise ModelLoadError(f"adapter {module.lora_name!r}: {error}") from None
        self._lora.load(module.lora_int_id, matrices)

    def __contains__(self, lora_id: object) -> bool:
        return self._lora is not None and lora_id in self._lora

    def unload(self, lora_id: int) -> None:
        """Free the memory of an adapter that no request uses."""
        assert self._lora is not None, "the adapter was loaded"
        self._lora.unload(lora_id)
