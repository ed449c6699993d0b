"""The limits of a request, which are checked when it arrives."""

from __future__ import annotations

from chairlift.config import SchedulerConfig
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.errors import RequestError
from chairlift.request import Request


def check_length(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> None:
    """Raise RequestError, with the arithmetic, if the request is too long for the model or for the memory."""
    # A request that generates no tokens has one output token, which is never computed.
    if request.max_total_tokens - config.is_pooling > config.max_model_len:
        raise RequestError(
            f"{request.num_prompt_tokens} prompt tokens and up to "
            f"{request.max_total_tokens - request.num_prompt_tokens} output tokens exceed "
            f"max_model_len={config.max_model_len}",
            "max_tokens",
        )
    kv.check_fits(request)
