"""The service level objectives (SLO) of a request: the latencies that it should have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from chairlift.errors import ConfigError, RequestError

MAX_SLO_MS: Final = 86_400_000
"""The largest objective in milliseconds: one day."""


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives in milliseconds; None is no objective. They change neither the tokens nor the end of a request.

    Attributes:
        ttft_ms: time to first token.
        tpot_ms: mean time per output token after the first.

    Raises:
        RequestError: an objective is out of range, or there is none.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise RequestError("slo must have ttft_ms, tpot_ms or both", "slo")
        for name, value in asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value <= MAX_SLO_MS):
                limit = f"a number of milliseconds above 0 and at most {MAX_SLO_MS}"
                raise RequestError(f"slo.{name} must be {limit}, got {value!r:.100}", f"slo.{name}")

    @classmethod
    def from_mapping(cls, given: Any) -> SLO:
        """The SLO with the fields of a mapping.

        Raises:
            RequestError: it is no mapping, has other fields, or as for the class.
        """
        if not isinstance(given, Mapping) or not given.keys() <= {"ttft_ms", "tpot_ms"}:
            raise RequestError(f"slo must be an object with ttft_ms, tpot_ms or both, got {given!r:.100}", "slo")
        return cls(**given)

    def to_mapping(self) -> dict[str, float]:
        """The objectives by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def is_met(self, ttft: float | None, tpot: float | None) -> bool:
        """Whether latencies in seconds are within the objectives. Without a first token the objectives are missed; a
        single token has no TPOT."""
        return ttft is not None and not self.misses_ttft(ttft) and not self.misses_tpot(tpot)

    def misses_ttft(self, ttft: float) -> bool:
        return self.ttft_ms is not None and ttft * 1e3 > self.ttft_ms

    def misses_tpot(self, tpot: float | None) -> bool:
        return self.tpot_ms is not None and tpot is not None and tpot * 1e3 > self.tpot_ms


def parse_slo(given: str | Iterable[str], name: str) -> SLO:
    """Parse "ttft:100 tpot:50", vLLM's notation of `--goodput` in milliseconds, or a list of its parts.

    Raises:
        ConfigError: the text has another form, or an objective is out of range.
    """
    fields: dict[str, float] = {}
    for part in (given if isinstance(given, str) else " ".join(given)).split():
        metric, _, text = part.partition(":")
        field = f"{metric}_ms"
        try:
            value = float(text)
        except ValueError:
            field = ""
        if field not in ("ttft_ms", "tpot_ms") or field in fields:
            raise ConfigError(f"{name} must be ttft:MILLISECONDS, tpot:MILLISECONDS or both, got {part!r:.100}")
        fields[field] = value
    try:
        return SLO(**fields)
    except RequestError as error:
        raise ConfigError(f"{name}: {error}") from None
