"""KVLayout: groups the layers with attention by the tokens that their queries read, for KV memory.

    layer    0       1       2     3       4       5          a page of group 0: layers 2, 5
    window   512     512     -     512     512     -          a page of group 1: layers 0, 1
    group    1       1       0     2       2       0          a page of group 2: layers 3, 4
    position 0       1       0     0       1       1

A page has the K and V of one block of tokens in the layers of one group. All groups have as many layers, so all pages
have the same size, and any group can use any page of the pool. The groups follow vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.model_config import ModelConfig

EQUAL_SIZES_FACTOR: Final = 1.25
"""Kinds of layers whose numbers differ by less are groups of the larger number, so that there are fewer groups."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of layers with separate block tables. Layers without attention are in no group.

    Attributes:
        windows: for each group the number of tokens that a query attends to, including its own; None for all preceding
            tokens.
        layers: for each group the indices of its layers, by their position in a page. The last group of a kind may have
            fewer layers than a page has positions.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def one_group(cls, config: ModelConfig, window: int | None = None) -> KVLayout:
        """One block table for all layers with attention."""
        return cls((window,), (tuple(config.attention_specs),))

    @classmethod
    def by_window(cls, config: ModelConfig, context: int) -> KVLayout:
        """The groups with which blocks that leave the window of their layers can be used again.

        A window of `context` tokens or more has no effect. If K and V of the layers differ in size, or layers read K
        and V of others, all layers are one group, whose blocks are needed as long as the longest window.
        """
        specs = config.attention_specs
        kinds: dict[int | None, list[int]] = {}
        for index, spec in specs.items():
            window = spec.sliding_window
            kinds.setdefault(None if window is None or window >= context else window, []).append(index)
        are_alike = len({(spec.num_kept_kv_heads, spec.head_dim) for spec in specs.values()}) == 1
        if not are_alike or len(kinds) == 1:
            longest = None if None in kinds else max(window for window in kinds if window is not None)
            return cls.one_group(config, longest)
        size = group_size([len(layers) for layers in kinds.values()])
        groups = [
            (window, tuple(layers[start : start + size]))
            for window, layers in sorted(kinds.items(), key=lambda item: item[0] or 0)
            for start in range(0, len(layers), size)
        ]
        return cls(tuple(window for window, _ in groups), tuple(layers for _, layers in groups))

    def positions(self, config: ModelConfig) -> list[AttentionSpec]:
        """The attention of a layer at each position of a page."""
        specs, largest = config.attention_specs, max(self.layers, key=len)
        return [specs[index] for index in largest]


def group_size(counts: Sequence[int]) -> int:
    """The number of layers of every group: the smallest number of layers of a kind, or the largest one if all are
    almost equal, because a kind with one layer more would need another group."""
    smallest, largest = min(counts), max(counts)
    return largest if largest < EQUAL_SIZES_FACTOR * smallest else smallest
