"""The hashes by which the contents of blocks are found, in the pool and in stores."""

from __future__ import annotations

import hashlib
from array import array


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash of a block's tokens and of all tokens before them, whose hash is `parent`.

    It is SHA-256, because a collision would show the contents of one request to another.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def root_hash(cache_salt: str | None, lora_id: int = 0) -> bytes:
    """The parent of a request's first block. Requests with different salts hash the same tokens to different values, so
    they neither share blocks nor learn from response times what others have computed. Requests with different LoRA
    adapters compute other keys and values from the same tokens."""
    root = b"" if cache_salt is None else hashlib.sha256(b"cache salt\0" + cache_salt.encode()).digest()
    return root if not lora_id else hashlib.sha256(b"lora\0" + lora_id.to_bytes(8) + root).digest()


def group_key(block: bytes, group: int) -> bytes:
    """The key of a block of one group of layers in the index of the pool, which has blocks of all groups."""
    return block if group == 0 else block + group.to_bytes(2)
