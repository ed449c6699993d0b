"""The prefix cache: finds blocks by a chain of hashes, one for each full block of a request.

    tokens   [ 5 8 2 9 ][ 4 4 7 1 ][ 3 6          blocks of 4 tokens; the last one is not full
    chain       h0 ---------> h1                  h1 = hash(h0, tokens of its block)

Equal hashes mean equal tokens from the start of the prompt on, with the same salt and adapter, so K and V are equal.
"""

from __future__ import annotations

import hashlib
from array import array

from chairlift.core.kv.block_pool import BlockPool
from chairlift.request import Request


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


class PrefixCache:
    """Hash chains of the unfinished requests, over the index of a block pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chains: dict[str, list[bytes]] = {}

    def find(self, request: Request, limit: int) -> list[int]:
        """The cached blocks of the longest prefix of the request's tokens, at most `limit` blocks."""
        prefix: list[int] = []
        for block_id in map(self._pool.find, self.chain(request, limit)):
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix

    def register(self, request: Request, block_ids: list[int], start: int, end: int) -> None:
        """Index the blocks `start` to `end - 1` of the request's table, which are full and computed."""
        chain = self.chain(request, end)
        for index in range(start, end):
            self._pool.register(block_ids[index], chain[index])

    def chain(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` blocks of the request's tokens, which must be full; computed once."""
        chain = self._chains.setdefault(request.request_id, [])
        size = self._block_size
        for index in range(len(chain), num_blocks):
            parent = chain[-1] if chain else root_hash(request.cache_salt, request.lora_id)
            chain.append(block_hash(parent, request.token_ids[index * size : (index + 1) * size]))
        return chain[:num_blocks]

    def forget(self, request: Request) -> None:
        """Drop the request's hash chain. Its blocks stay in the index."""
        self._chains.pop(request.request_id, None)
