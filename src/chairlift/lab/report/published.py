"""Published numbers that a report shows for comparison, with their source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PublishedWaste:
    """Shares of KV memory in percent. `undivided` is the sum of the kinds of waste, where only the sum is published."""

    name: str
    policy: str
    token_states: float
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    undivided: float = 0.0


KWON_2023_FIGURE_2: Final = (
    PublishedWaste("Orca (Max)", "max", 20.4, 13.3, 57.3, 8.9),
    PublishedWaste("Orca (Pow2)", "pow2", 26.8, 17.9, 13.6, 41.6),
    PublishedWaste("Orca (Oracle)", "oracle", 38.2, 25.2, 0.0, 36.6),
    PublishedWaste("vLLM", "paged", 96.3, undivided=3.7),
)
"""Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP'23,
Figure 2."""

KWON_2023_SETTING: Final = "Kwon et al., SOSP'23, Figure 2: OPT-13B on one A100, ShareGPT requests"
