"""Attention of encoders: the tokens of each text attend to one another, without KV memory.

Texts of different lengths are packed one after the other, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from chairlift.kernels.attention import AttentionBackend, AttentionMetadata, AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.torch_ops import norm_and_rotate


@dataclass(slots=True)
class PackedTexts:
    """The texts of one step.

    Attributes:
        lengths: the number of tokens of each text, in the order of the packed tokens.
        masks: the masks of windows by (length, window).
    """

    lengths: list[int]
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, length: int, window: int) -> torch.Tensor:
        """Bool [length, length]: which tokens are less than `window` positions apart."""
        if (length, window) not in self.masks:
            position = torch.arange(length)
            self.masks[length, window] = (position[:, None] - position).abs() < window
        return self.masks[length, window]


class PackedAttention(AttentionBackend[PackedTexts]):
    """Attention in both directions within each text.

    Args:
        run_all: calls functions, in parallel if it can; they write to different rows.
    """

    def __init__(self, shape: AttentionShape, run_all: Callable[[Sequence[Callable[[], None]]], None]) -> None:
        super().__init__(shape)
        self._run_all = run_all

    def plan(self, metadata: AttentionMetadata) -> PackedTexts:
        raise NotImplementedError("an encoder has no paged memory")

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: PackedTexts,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = self.shape.split(qkv)
        assert key is not None
        assert value is not None
        assert qk_norm is None or not qk_norm.norms_values
        query = norm_and_rotate(query, qk_norm and qk_norm.query, qk_norm, rotary)
        key = norm_and_rotate(key, qk_norm and qk_norm.key, qk_norm, rotary)
        out = torch.empty(query.shape, dtype=query.dtype)

        def attend(start: int, length: int) -> None:
            rows = slice(start, start + length)
            mask = None if sliding_window is None or sliding_window >= length else plan.mask(length, sliding_window)
            q, k, v = (each[rows].transpose(0, 1)[None] for each in (query, key, value))
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.shape.scale, enable_gqa=self.shape.group_size > 1
            )
            out[rows] = attended[0].transpose(0, 1)

        starts = accumulate(plan.lengths, initial=0)
        self._run_all([partial(attend, start, length) for start, length in zip(starts, plan.lengths, strict=False)])
        return out.flatten(1)
