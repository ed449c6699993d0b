"""How long an answer took, where it was asked for (`timings: true`)."""

from __future__ import annotations

from pydantic import BaseModel


class Timings(BaseModel):
    """Seconds, from arrival on; of the answer that ended last. Rates are null where nothing was computed in no time.

    Attributes:
        queue: until the first step.
        prefill: from there to the first token.
        decode: from there to the last one.
        prompt_tokens_per_second: of the prompt without what was cached, while in prefill.
        output_tokens_per_second: after the first token.
    """

    queue: float
    prefill: float
    decode: float
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None
