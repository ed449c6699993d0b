"""The configuration of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from chairlift.errors import ConfigError

METHODS: Final = ("ngram", "draft_model", "mtp")
DEFAULT_TOKENS: Final = {"ngram": 12, "draft_model": 4, "mtp": 3}
MTP_NAMES: Final = ("qwen3_5_mtp", "qwen3_next_mtp")
"""Names that vLLM accepts for "mtp"."""
DEFAULT_LOOKUP_MIN: Final = 2
DEFAULT_LOOKUP_MAX: Final = 16
MAX_SPECULATIVE_TOKENS: Final = 64
MAX_LOOKUP: Final = 64


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How draft tokens are proposed, with vLLM's field names.

    Attributes:
        method: "ngram" (prompt lookup) proposes the tokens that followed an earlier occurrence of the last tokens;
            "draft_model" proposes the tokens of a smaller model; "mtp" uses the model's own predictor. "" selects
            "draft_model" if `model` is set, otherwise "ngram". Also one of MTP_NAMES.
        num_speculative_tokens: maximum number of draft tokens of a request in a step; fewer are verified if they would
            not pay. None selects the default of the method.
        prompt_lookup_min: the number of last tokens that an earlier occurrence must have in common.
        prompt_lookup_max: the number of tokens that are compared to choose among several occurrences.
        model: the draft model, as `EngineConfig.model`. Its tokenizer must have the same vocabulary.
        quantization: the format to which the matrices of the draft model are quantized; None keeps the file's format.

    Raises:
        ConfigError: a value is invalid.
    """

    method: str = ""
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = DEFAULT_LOOKUP_MIN
    prompt_lookup_max: int = DEFAULT_LOOKUP_MAX
    model: str | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if not self.method:
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        if self.method in MTP_NAMES:
            object.__setattr__(self, "method", "mtp")
        if self.method not in METHODS:
            raise ConfigError(f"speculative_config: method must be one of {', '.join(METHODS)}; got {self.method!r}")
        if self.method == "draft_model" and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"speculative_config: method=draft_model needs model, a draft model; got {self.model!r}")
        if self.method != "draft_model":
            for name in ("model", "quantization"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"speculative_config: {name} needs method=draft_model: remove one of them")
        lookup = self.prompt_lookup_min, self.prompt_lookup_max
        if self.method != "ngram" and lookup != (DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX):
            raise ConfigError(
                "speculative_config: prompt_lookup_min and prompt_lookup_max need method=ngram: remove them, or "
                f"{'model' if self.method == 'draft_model' else 'method=mtp'}"
            )
        if self.num_speculative_tokens is not None:
            self._check_range("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        self._check_range("prompt_lookup_min", 1, MAX_LOOKUP)
        self._check_range("prompt_lookup_max", self.prompt_lookup_min, MAX_LOOKUP)

    @property
    def max_draft_tokens(self) -> int:
        """`num_speculative_tokens`, or the default of the method."""
        return self.num_speculative_tokens or DEFAULT_TOKENS[self.method]

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"speculative_config: {name} must be an integer from {low} to {high}, got {value!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration with these fields. Raises ConfigError if a field is unknown or a value is invalid."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise ConfigError(f"speculative_config may have {', '.join(known)}; got {', '.join(map(str, unknown))}")
        return cls(**values)
