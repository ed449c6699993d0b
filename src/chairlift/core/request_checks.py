"""The limits of a request, which are checked when it arrives."""

from __future__ import annotations

from chairlift.config import SchedulerConfig
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.errors import RequestError
from chairlift.request import Request


def check_limits(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> None:
    """Raise RequestError, with the arithmetic, if the request is too large for the model, the batch or the memory."""
    # A request that generates no tokens has one output token, which is never computed.
    if request.max_total_tokens - config.is_pooling > config.max_model_len:
        raise RequestError(
            f"{request.num_prompt_tokens} prompt tokens and up to "
            f"{request.max_total_tokens - request.num_prompt_tokens} output tokens exceed "
            f"max_model_len={config.max_model_len}",
            "max_tokens",
        )
    kv.check_fits(request)
    if (width := request.sampling_params.n) > config.max_num_seqs:
        raise RequestError(
            f"n={width} beams need as many seats, and max_num_seqs="
            f"{config.max_num_seqs}: lower n, or raise --max-num-seqs",
            "n",
        )
    if width > 1 and (needed := width * kv.worst_case_blocks(request)) > kv.num_blocks:
        raise RequestError(
            f"the request can never fit: n={width} beams of up to {request.max_total_tokens} "
            f"tokens need {needed} blocks of {kv.block_size} while they share none, and the whole pool has "
            f"{kv.num_blocks}. Lower n or max_tokens, shorten the prompt, or raise --kv-cache-memory-bytes.",
            "max_tokens",
        )
