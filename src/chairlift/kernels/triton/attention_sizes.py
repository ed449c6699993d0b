"""The sizes of Triton attention that decide its memory, without torch and triton."""

from __future__ import annotations

from typing import Final

SPLIT_KEYS: Final = 512
"""The number of keys of a split."""

MAX_DECODE_TOKENS: Final = 8
"""The maximum number of query tokens of a sequence whose splits are computed in parallel."""

MAX_SPLIT_BYTES: Final = 1 << 26
"""The maximum size of the sums of splits; splits that need more are computed one after the other."""
