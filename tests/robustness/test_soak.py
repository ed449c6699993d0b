"""The short soak test with one seed. The long run is `make soak`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tools.soak import check_descriptors, serve_models, soak
from tools.soak_calls import SoakCalls

from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE

ROUNDS = 2


def test_nothing_is_left_of_many_requests(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    rounds = iter(range(ROUNDS))
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    chat_model = with_api_tokenizer(tiny, tmp_path / "chat")
    with serve_models(tmp_path, str(chat_model)) as served:
        calls = SoakCalls(served.url, tmp_path / "adapter", seed=3)
        result = asyncio.run(soak(served, calls, 4, lambda: next(rounds, None) is not None, size=0.1))
    check_descriptors(result)
    tally = result.tally
    assert tally.outcomes["answered"] > tally.num_requests / 2
    assert min(tally.outcomes["aborted"], tally.outcomes["rejected"], tally.kinds["structured_outputs"]) > 0
    assert sum(result.calls.values()) == 12 * ROUNDS
